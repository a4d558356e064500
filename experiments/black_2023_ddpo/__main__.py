"""`python -m experiments.black_2023_ddpo` runs train.py."""

from experiments.black_2023_ddpo.train import main, settings

if __name__ == "__main__":
    main(*settings())
