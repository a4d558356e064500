"""`python -m experiments.stiennon_2020_summarize` runs train.py."""

from experiments.stiennon_2020_summarize.train import main, settings

if __name__ == "__main__":
    main(*settings())
