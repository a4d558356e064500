"""Trainers that fine-tune language models from texts, preferences and rewards."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
