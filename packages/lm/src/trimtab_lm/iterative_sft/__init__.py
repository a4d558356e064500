"""Supervised fine-tuning step by step; the caller generates and filters data between steps."""

from trimtab_lm.sampling.best_of_n import BestOfNSampler

from .config import IterativeSFTConfig
from .trainer import IterativeSFTTrainer

__all__ = ["BestOfNSampler", "IterativeSFTConfig", "IterativeSFTTrainer"]
