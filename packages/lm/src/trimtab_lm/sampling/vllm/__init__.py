"""Rollouts by vLLM: an engine in the training process, or servers. Only a backend that is asked for imports it."""

from .engine import VLLMRollout
from .server import VLLMServerRollout

__all__ = ["VLLMRollout", "VLLMServerRollout"]
