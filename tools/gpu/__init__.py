"""What needs a GPU, in parts of less than eight minutes, with a record of each: `python -m tools.gpu`."""
