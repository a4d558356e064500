"""Every trainer beside its peer: `python -m tools.bench`, and README.md for how and what came out."""
