"""Supervised fine-tuning in steps that the caller takes, with whatever it generates and filters between them."""

from trimtab_lm.sampling.best_of_n import BestOfNSampler

from .config import IterativeSFTConfig
from .trainer import IterativeSFTTrainer

__all__ = ["BestOfNSampler", "IterativeSFTConfig", "IterativeSFTTrainer"]
