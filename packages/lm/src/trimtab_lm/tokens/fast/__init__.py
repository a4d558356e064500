"""Attention on a CPU that is cheaper than a mask of the whole row; `TokenReader` says where it runs.

`python -m tools.bench.ablation` measures what it brings to a whole step.
"""

from .groups import GroupMask

__all__ = ["GroupMask"]
