"""DiffusionNFT: rewards by regression on noised samples (Zheng et al. 2025, arXiv:2509.16117)."""

from .config import DiffusionNFTConfig
from .trainer import DiffusionNFTTrainer

__all__ = ["DiffusionNFTConfig", "DiffusionNFTTrainer"]
