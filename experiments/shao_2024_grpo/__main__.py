"""`python -m experiments.shao_2024_grpo` runs train.py."""

from experiments.shao_2024_grpo.train import main, settings

if __name__ == "__main__":
    main(*settings())
