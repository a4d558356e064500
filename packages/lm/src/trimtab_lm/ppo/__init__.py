"""PPO with a value head, a separate critic or both trunks shared, on a loop of its own."""

from .config import PPOConfig
from .trainer import PPOTrainer

__all__ = ["PPOConfig", "PPOTrainer"]
