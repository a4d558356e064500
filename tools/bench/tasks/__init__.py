"""What is measured: a module for each work, whose `run` measures one side."""
