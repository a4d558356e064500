"""Reward models: sequence classifiers with one label, trained on pairs of answers."""

from .config import RewardConfig
from .trainer import RewardTrainer

__all__ = ["RewardConfig", "RewardTrainer"]
