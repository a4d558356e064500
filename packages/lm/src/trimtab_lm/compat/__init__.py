"""Names of other libraries that are private, or that differ between the releases that are supported."""
