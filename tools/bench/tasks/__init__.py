"""The tasks: each module's `run` measures one side of a work."""
