"""The arguments, collators and datasets of old TRL (0.7 to 0.11)."""
