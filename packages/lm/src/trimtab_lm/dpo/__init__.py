"""Preference learning without a reward model: DPO and its relatives."""

from .config import DPOConfig
from .trainer import DPOTrainer

__all__ = ["DPOConfig", "DPOTrainer"]
