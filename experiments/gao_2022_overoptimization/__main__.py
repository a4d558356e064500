"""`python -m experiments.gao_2022_overoptimization` runs train.py."""

from experiments.gao_2022_overoptimization.train import main, settings

if __name__ == "__main__":
    main(*settings())
