"""Attention on a CPU that is cheaper than a mask of the whole row; `runs_by_group` says where it can run.

`python -m tools.bench.ablation` measures what it brings to a whole step.
"""

from .groups import GroupMask, runs_by_group

__all__ = ["GroupMask", "runs_by_group"]
