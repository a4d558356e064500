"""Learning from single answers that are labelled desirable or undesirable: KTO."""

from .config import KTOConfig
from .trainer import KTOTrainer

__all__ = ["KTOConfig", "KTOTrainer"]
