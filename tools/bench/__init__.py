"""Times every trainer beside its peer: `python -m tools.bench`. README.md has the method and the results."""
