"""`python -m experiments.clark_2023_draft` runs train.py."""

from experiments.clark_2023_draft.train import main, settings

if __name__ == "__main__":
    main(*settings())
