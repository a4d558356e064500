"""Checks the results of reward functions, for every trainer and sampler."""

import math
import numbers
import reprlib
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

LARGEST = float(torch.finfo(torch.float32).max)
"""The largest score: float32 holds nothing above it."""


class RewardError(ValueError, TypeError):
    """What a reward function returned cannot be used.

    It is a TypeError too: its kind may be wrong, or its numbers.
    """


def checked_scores(result: object, items: Sequence[str], *, source: str, may_abstain: bool = False) -> list[float]:
    """Scores as numbers, one for each item.

    Args:
        result: a list, tuple, tensor, array, range or iterator of numbers: Python's, NumPy's, or tensors of one
            element, on any device. Tensors and arrays may be [B] or [B, 1].
        items: B names of the scored items for errors, such as "completion 3".
        source: whose result it is, as errors begin: "What reward_function returned".
        may_abstain: whether an entry may be None.

    Returns:
        B finite numbers, NaN where an entry is None.

    Raises:
        RewardError: the result is nothing of this kind, there is not one entry per item, or an entry is not a number
            that is finite in float32.
    """
    needed = f"a list of {len(items)} numbers is needed, one per item{', None where it does not apply' * may_abstain}"
    if isinstance(result, Iterator | range):
        result = list(islice(result, len(items) + 1))
    if isinstance(result, Tensor) and result.is_meta:
        raise RewardError(f"{source} is a tensor on the device 'meta', which holds no numbers. Compute it on the CPU.")
    if isinstance(result, Tensor | np.ndarray):
        if len(result.shape) == 0 or math.prod(result.shape[1:]) != 1:
            raise RewardError(
                f"{source} is {_kind(result)}: {needed}. Use a tensor or array of the shape [{len(items)}]."
            )
        result = result.reshape(-1).tolist()
    if not isinstance(result, list | tuple):
        raise RewardError(
            f"{source} is {_kind(result)}: {needed}. Use a list, a tuple, or a tensor or array [{len(items)}]; of a "
            "dict list(scores.values())."
        )
    if len(result) != len(items):
        raise RewardError(
            f"{source} has {len(result)} scores for {len(items)} items: {needed}. Score each item, in their order."
        )
    values, broken = list[float](), list[str]()
    for value, item in zip(result, items, strict=True):
        if value is None and may_abstain:
            values.append(math.nan)
            continue
        values.append(_number(value, source, item, needed))
        if not abs(values[-1]) <= LARGEST:  # NaN is not
            broken.append(f"{values[-1]} for {item}")
    if broken:
        more = f" and {len(broken) - 4} more" if len(broken) > 4 else ""
        raise RewardError(
            f"{source} has {', '.join(broken[:4])}{more}: a score must be a finite number of float32. Nothing was "
            "trained on them; fix the reward."
        )
    return values


def require_finite(keeper: str, /, **numbers: float) -> None:
    """Raises a ValueError that names NaN and infinite values, before they enter the state of `keeper`."""
    if broken := [f"{name}={value}" for name, value in numbers.items() if not math.isfinite(value)]:
        raise ValueError(
            f"{keeper}: {', '.join(broken)} came, and finite numbers are needed, because they are kept for all later "
            "steps. The state did not change; leave these numbers out, or correct what computes them."
        )


def _number(value: object, source: str, item: str, needed: str) -> float:
    came = value
    if isinstance(value, Tensor | np.generic | np.ndarray) and math.prod(value.shape) == 1:
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise RewardError(
            f"{source} has {_kind(came)} for {item}: {needed}. Convert it with float(), or take the one number that is "
            "the score."
        )
    try:
        return float(value)
    except OverflowError:  # an integer that no float holds
        return math.inf


def _kind(value: object) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"a {type(value).__name__} of shape {list(value.shape)} and type {value.dtype}"
    return f"{reprlib.repr(value)} ({type(value).__name__})"
