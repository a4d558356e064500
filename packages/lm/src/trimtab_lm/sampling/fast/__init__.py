"""A sampling loop that is faster than transformers'; `loop_for` is its only entrance.

Two tricks make it so, and `python -m tools.bench.ablation` measures what each brings to a whole step: rows that have
ended leave the batch, and a CPU draws a token of a large vocabulary with one random number.
"""

from .loop import loop_for

__all__ = ["loop_for"]
