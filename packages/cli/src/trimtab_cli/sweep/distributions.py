"""What a sweep draws from: the distributions of W&B's sweep schema, each by its quantile function."""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import accumulate
from statistics import NormalDist
from typing import Any

Settings = Mapping[str, Any]
Kind = tuple[Settings, Callable[[Settings, float], Any]]
"""The keys of a distribution with their defaults (...: none), and its quantile function."""


def between(low: float, high: float, u: float) -> float:
    """The u-quantile of the uniform distribution from low to high."""
    return min(max(low + (high - low) * u, low), high)


def between_logs(low: float, high: float, u: float) -> float:
    """The u-quantile where log X is uniform between log low and log high."""
    return min(max(math.exp(between(math.log(low), math.log(high), u)), low), high)


def gaussian(settings: Settings, u: float) -> float:
    """The u-quantile of the normal distribution."""
    return settings["mu"] + settings["sigma"] * NormalDist().inv_cdf(min(max(u, 1e-12), 1 - 1e-12))


def beta(settings: Settings, u: float) -> float:
    """The u-quantile of Beta(a, b), by bisection: as exact as a float, and no library at hand inverts the function."""
    from mpmath import betainc

    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        below = betainc(settings["a"], settings["b"], 0, middle, regularized=True) < u
        low, high = (middle, high) if below else (low, middle)
    return middle


def weighted(settings: Settings, u: float) -> Any:
    """The u-quantile of values with probabilities."""
    pairs = [pair for pair in zip(settings["values"], settings["probabilities"], strict=True) if pair[1] > 0]
    ends = list(accumulate(share for _, share in pairs))
    if not math.isclose(ends[-1], 1.0, abs_tol=1e-6):
        raise ValueError("probabilities that add up to 1 are needed")
    return pairs[min(bisect_right(ends, u), len(pairs) - 1)][0]


def quantized(kind: Kind) -> Kind:
    """round(X / q) * q, half to even as W&B does it; a whole q gives whole numbers."""

    def quantile(settings: Settings, u: float) -> float:
        q = settings["q"]
        steps = round(kind[1](settings, u) / q)
        return steps * q if isinstance(q, int) else float(f"{steps * q:.12g}")

    return {**kind[0], "q": 1}, quantile


BOUNDS, NORMAL = {"min": ..., "max": ...}, {"mu": 0.0, "sigma": 1.0}
CONTINUOUS: dict[str, Kind] = {
    "uniform": (BOUNDS, lambda s, u: between(s["min"], s["max"], u)),
    "log_uniform": (BOUNDS, lambda s, u: math.exp(between(s["min"], s["max"], u))),
    "log_uniform_values": (BOUNDS, lambda s, u: between_logs(s["min"], s["max"], u)),
    "inv_log_uniform": (BOUNDS, lambda s, u: math.exp(-between(s["min"], s["max"], 1 - u))),
    "inv_log_uniform_values": (BOUNDS, lambda s, u: 1 / between_logs(1 / s["max"], 1 / s["min"], 1 - u)),
    "normal": (NORMAL, gaussian),
    "log_normal": (NORMAL, lambda s, u: math.exp(gaussian(s, u))),
    "beta": ({"a": 1.0, "b": 1.0}, beta),
}
KINDS: dict[str, Kind] = {
    "constant": ({"value": ...}, lambda s, u: s["value"]),
    "categorical": ({"values": ...}, lambda s, u: s["values"][int(u * len(s["values"]) * (1 - 1e-12))]),
    "categorical_w_probabilities": ({"values": ..., "probabilities": ...}, weighted),
    "int_uniform": (BOUNDS, lambda s, u: min(s["min"] + int(u * (s["max"] - s["min"] + 1)), s["max"])),
    **CONTINUOUS,
    **{f"q_{name}": quantized(kind) for name, kind in CONTINUOUS.items() if not name.startswith("inv_")},
}
