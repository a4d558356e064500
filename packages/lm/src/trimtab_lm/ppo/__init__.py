"""PPO with a value head or a separate critic, with its own training loop."""

from .config import PPOConfig
from .trainer import PPOTrainer

__all__ = ["PPOConfig", "PPOTrainer"]
