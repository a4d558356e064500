"""Private names of torch and of diffusers, with the versions on which torch's were read."""
