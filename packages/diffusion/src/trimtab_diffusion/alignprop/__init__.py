"""AlignProp and DRaFT: the gradient of a reward through the denoising steps (arXiv:2310.03739, arXiv:2309.17400)."""

from .config import AlignPropConfig
from .trainer import AlignPropTrainer

__all__ = ["AlignPropConfig", "AlignPropTrainer"]
