"""Trainers that fine-tune diffusion pipelines from rewards."""

import lazy_loader

from trimtab_common.compat.noise import silence_known

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
silence_known()
