"""Names of torch that are private, with the versions on which they were read."""
