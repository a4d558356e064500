"""Names of other libraries that are private, or differ between supported releases."""
