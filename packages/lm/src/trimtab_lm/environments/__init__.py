"""Rollouts as conversations with tools, or with any other environment that reads and replies."""

from trimtab_lm.environments.protocol import Environment, Reply
from trimtab_lm.environments.rollout import EnvironmentRollout
from trimtab_lm.environments.tools import ToolEnvironment

__all__ = ["Environment", "EnvironmentRollout", "Reply", "ToolEnvironment"]
