"""Fetches the experiments' models and data ahead of time, so that later runs need no network."""

from argparse import ArgumentParser

from experiments import assets
from experiments.assets import data

FETCHED = ["stories15m", "smollm2_135m_instruct", "sentence_encoder"]
FETCHED += ["openings", "imdb_reviews", "preferences", "state_of_the_union"]


def main() -> None:
    """Fetches the assets that the command line names, or all assets."""
    parser = ArgumentParser(prog="python -m experiments.assets", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"any of {', '.join(FETCHED)} (default: all)")
    names = parser.parse_args().names or FETCHED
    if unknown := set(names).difference(FETCHED):
        parser.error(f"no such asset: {', '.join(sorted(unknown))}; there are {', '.join(FETCHED)}")
    for name in names:
        if name == "openings":
            print(f"{name}: " + ", ".join(f"{len(assets.openings(split))} to {split}" for split in data.BOOKS))
        else:
            print(f"{name}: {getattr(assets, name)()}")


if __name__ == "__main__":
    main()
