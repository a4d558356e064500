"""Supervised fine-tuning: the log-likelihood of documents, of completions, or of an assistant's turns."""

from trimtab_lm.legacy.constant_length import ConstantLengthDataset

from .config import SFTConfig
from .trainer import SFTTrainer

__all__ = ["ConstantLengthDataset", "SFTConfig", "SFTTrainer"]
