"""`python -m experiments.rafailov_2023_dpo_frontier` runs train.py."""

from experiments.rafailov_2023_dpo_frontier.train import main, settings

if __name__ == "__main__":
    main(*settings())
