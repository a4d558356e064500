"""Private names of torch, each in one small function that says on which version it was read."""
