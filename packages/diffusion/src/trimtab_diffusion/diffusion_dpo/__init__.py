"""Diffusion-DPO: preferences between pictures of one caption (Wallace et al. 2023, arXiv:2311.12908)."""

from .config import DiffusionDPOConfig
from .trainer import DiffusionDPOTrainer

__all__ = ["DiffusionDPOConfig", "DiffusionDPOTrainer"]
