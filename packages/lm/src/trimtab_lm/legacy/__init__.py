"""The arguments, collators and datasets of TRL in 2024."""
