"""Runs and records what needs a GPU, in parts of less than eight minutes: `python -m tools.gpu`."""
