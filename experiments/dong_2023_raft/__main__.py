"""`python -m experiments.dong_2023_raft` runs train.py."""

from experiments.dong_2023_raft.train import main, settings

if __name__ == "__main__":
    main(*settings())
