"""Group relative policy optimization (Shao et al. 2024, arXiv:2402.03300)."""

from .config import GRPOConfig
from .trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
