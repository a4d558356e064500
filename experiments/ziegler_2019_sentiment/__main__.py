"""`python -m experiments.ziegler_2019_sentiment` runs train.py."""

from experiments.ziegler_2019_sentiment.train import main, settings

if __name__ == "__main__":
    main(*settings())
