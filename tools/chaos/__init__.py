"""Kills and restarts training processes until their runs end, and compares them with undisturbed runs."""
