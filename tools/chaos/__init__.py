"""Kills and restarts training processes until their runs end, and compares them with runs that were left alone."""
