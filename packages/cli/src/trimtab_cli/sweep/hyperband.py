"""Hyperband's early stopping (Li et al. 2016, arXiv:1603.06560), by the brackets of W&B's sweeps.

An iteration is one time that a run logged the metric. At each bracket's iteration the best 1/eta of the values that
any run had there set a threshold; a running run that is beyond the threshold of its last bracket, or of one that it
has passed since it was last compared, is stopped. `strict` compares the value at the bracket; otherwise the best that
the run has had so far.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from trimtab_cli.sweep.spec import Hyperband

Key = TypeVar("Key")


def brackets(settings: Hyperband, longest: int) -> list[int]:
    """The iterations at which runs are compared, in order.

    min_iter: min_iter * eta^n for n = 0, 1, ..., up to `longest`.
    max_iter: max_iter / eta^n for n = 1, ..., s, those of 1 or more; it wins over min_iter.
    """
    if settings.max_iter is not None and settings.s is not None:
        sizes = [settings.max_iter / settings.eta**n for n in range(1, settings.s + 1)]
        return sorted(int(size) for size in sizes if size >= 1)
    iterations, size = [], float(settings.min_iter or 1)
    while int(size) <= longest:
        iterations.append(int(size))
        size *= settings.eta
    return iterations


def runs_to_stop(
    settings: Hyperband,
    histories: Mapping[Key, Sequence[float]],
    running: Collection[Key],
    *,
    sign: float,
    compared: Mapping[Key, int],
) -> dict[Key, str]:
    """Which of `running` to stop, and why in words.

    histories: the finite values of the metric in the order they were logged, of every run of the sweep.
    sign: 1 where less is better, -1 where more is.
    compared: how many iterations a run had when it was last compared.
    """
    losses = {key: [sign * value for value in values] for key, values in histories.items()}
    thresholds: dict[int, float] = {}
    for bracket in brackets(settings, max(map(len, losses.values()), default=0)):
        there = sorted(values[bracket - 1] for values in losses.values() if len(values) >= bracket)
        if there:
            thresholds[bracket] = there[int(len(there) / settings.eta)]
    stopped = {}
    for key in running:
        passed = [bracket for bracket in thresholds if bracket <= len(losses.get(key, ()))]
        if not passed:
            continue
        for bracket in passed:
            if bracket <= compared.get(key, 0) and bracket != passed[-1]:
                continue
            value = losses[key][bracket - 1] if settings.strict else min(losses[key])
            if value > thresholds[bracket]:
                stopped[key] = f"{sign * value:.6g} at iteration {bracket}, limit {sign * thresholds[bracket]:.6g}"
                break
    return stopped
