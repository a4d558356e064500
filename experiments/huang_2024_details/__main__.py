"""`python -m experiments.huang_2024_details` runs train.py."""

from experiments.huang_2024_details.train import main, settings

if __name__ == "__main__":
    main(*settings())
