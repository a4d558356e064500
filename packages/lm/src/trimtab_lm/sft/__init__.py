"""Supervised fine-tuning: the log-likelihood of documents, of completions, or of an assistant's turns."""

from .config import SFTConfig
from .constant_length import ConstantLengthDataset
from .trainer import SFTTrainer

__all__ = ["ConstantLengthDataset", "SFTConfig", "SFTTrainer"]
