"""Rollouts by vLLM: an engine in the training process, or servers. Imported only when a config asks for it."""

from .engine import VLLMRollout
from .server import VLLMServerRollout

__all__ = ["VLLMRollout", "VLLMServerRollout"]
