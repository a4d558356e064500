"""DDPO: policy gradients for diffusion pipelines (Black et al. 2023, arXiv:2305.13301)."""

from .config import DDPOConfig
from .trainer import DDPOTrainer

__all__ = ["DDPOConfig", "DDPOTrainer"]
