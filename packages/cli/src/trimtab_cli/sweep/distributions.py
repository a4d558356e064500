"""What a sweep draws from: the distributions of W&B's sweep schema, each by its quantile function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

Check = Callable[[Any], str | None]
Quantile = Callable[[Mapping[str, Any], float], Any]

LARGEST_EXPONENT = 700.0  # of e, within a float


class SweepError(ValueError):
    """A sweep that cannot be run as it is written; the message names the key at fault."""


def number(value: Any) -> str | None:
    """What is missing for `value` to be a finite number, or None."""
    if isinstance(value, str):
        return "a number is needed, not text. Write it without quotes"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "a finite number is needed"
    return None


def positive(value: Any) -> str | None:
    """The same for a number above 0."""
    return number(value) or (None if value > 0 else "a number above 0 is needed")


def not_negative(value: Any) -> str | None:
    """The same for a number of 0 or more."""
    return number(value) or (None if value >= 0 else "a number of 0 or more is needed")


def whole(value: Any) -> str | None:
    """The same for a whole number."""
    return None if isinstance(value, int) and not isinstance(value, bool) else "a whole number is needed"


def exponent(value: Any) -> str | None:
    """A bound of log_uniform and its kin, which are powers of e."""
    if problem := number(value):
        return problem
    if abs(value) > LARGEST_EXPONENT:
        return "this bound is an exponent of e; log_uniform_values, with q_ or inv_ as needed, takes the value itself"
    return None


def some(value: Any) -> str | None:
    """The same for a list with a value."""
    return None if isinstance(value, list) and value else "a list with at least one value is needed"


def alike(value: Any) -> str | None:
    """The same for a list in which every number is a number, not a text of one."""
    from trimtab_common.config.values import decode  # imports torch, which the help does without

    if problem := some(value):
        return problem
    texts = [item for item in value if isinstance(item, str) and number(decode(item)) is None]
    if texts and any(number(item) is None for item in value):
        return f"{texts[0]!r} is text, and other values are numbers. Write it without quotes, or quote them all"
    return None


def anything(value: Any) -> str | None:
    """None: every value will do."""
    return None


def probabilities(value: Any) -> str | None:
    """The same for numbers that add up to 1."""
    if problem := some(value):
        return problem
    if any(not_negative(item) for item in value) or not math.isclose(sum(value), 1.0, abs_tol=1e-6):
        return "numbers of 0 or more that add up to 1 are needed"
    return None


def one_of(values: Sequence[Any], u: float) -> Any:
    """The u-quantile of equally likely values."""
    return values[min(int(u * len(values)), len(values) - 1)]


def weighted(values: Sequence[Any], weights: Sequence[float], u: float) -> Any:
    """The u-quantile of values with probabilities."""
    total, chosen = 0.0, None
    for value, weight in zip(values, weights, strict=True):
        total += weight
        if weight > 0:
            chosen = value
        if u < total:
            break
    return chosen


def between(low: float, high: float, u: float) -> float:
    """The u-quantile of the uniform distribution from low to high."""
    return min(max(low + (high - low) * u, low), high)


def between_logs(low: float, high: float, u: float) -> float:
    """The u-quantile where log X is uniform between log low and log high."""
    return min(max(math.exp(between(math.log(low), math.log(high), u)), low), high)


def gaussian(mu: float, sigma: float, u: float) -> float:
    """The u-quantile of the normal distribution."""
    return mu + sigma * NormalDist().inv_cdf(min(max(u, 1e-12), 1 - 1e-12))


def beta(a: float, b: float, u: float) -> float:
    """The u-quantile of Beta(a, b), by bisection: as exact as a float, and no library at hand inverts the function."""
    from mpmath import betainc

    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if betainc(a, b, 0, middle, regularized=True) < u:
            low = middle
        else:
            high = middle
    return middle


@dataclass(frozen=True)
class Kind:
    """One distribution: the keys that it needs, those that it may have with their defaults, and its quantiles."""

    needs: Mapping[str, Check]
    quantile: Quantile
    may: Mapping[str, tuple[Check, Any]]


def _kind(needs: Mapping[str, Check], quantile: Quantile, **may: tuple[Check, Any]) -> Kind:
    return Kind(needs, quantile, may)


_BOUNDS = {"min": number, "max": number}
_VALUES = {"min": positive, "max": positive}
_EXPONENTS = {"min": exponent, "max": exponent}
_NORMAL = {"mu": (number, 0.0), "sigma": (not_negative, 1.0)}
_BETA = {"a": (positive, 1.0), "b": (positive, 1.0)}

_CONTINUOUS: dict[str, Kind] = {
    "uniform": _kind(_BOUNDS, lambda s, u: between(s["min"], s["max"], u)),
    "log_uniform": _kind(_EXPONENTS, lambda s, u: math.exp(between(s["min"], s["max"], u))),
    "log_uniform_values": _kind(_VALUES, lambda s, u: between_logs(s["min"], s["max"], u)),
    "inv_log_uniform": _kind(_EXPONENTS, lambda s, u: math.exp(-between(s["min"], s["max"], 1 - u))),
    "inv_log_uniform_values": _kind(_VALUES, lambda s, u: 1 / between_logs(1 / s["max"], 1 / s["min"], 1 - u)),
    "normal": _kind({}, lambda s, u: gaussian(s["mu"], s["sigma"], u), **_NORMAL),
    "log_normal": _kind({}, lambda s, u: math.exp(gaussian(s["mu"], s["sigma"], u)), **_NORMAL),
    "beta": _kind({}, lambda s, u: beta(s["a"], s["b"], u), **_BETA),
}


def _quantized(kind: Kind) -> Kind:
    """round(X / q) * q, half to even as W&B does it; a whole q gives whole numbers."""

    def quantile(settings: Mapping[str, Any], u: float) -> float:
        q = settings["q"]
        steps = round(kind.quantile(settings, u) / q)
        return steps * q if isinstance(q, int) else float(f"{steps * q:.12g}")

    return Kind(kind.needs, quantile, {**kind.may, "q": (positive, 1)})


KINDS: dict[str, Kind] = {
    "constant": _kind({"value": anything}, lambda s, u: s["value"]),
    "categorical": _kind({"values": alike}, lambda s, u: one_of(s["values"], u)),
    "categorical_w_probabilities": _kind(
        {"values": alike, "probabilities": probabilities}, lambda s, u: weighted(s["values"], s["probabilities"], u)
    ),
    "int_uniform": _kind(
        {"min": whole, "max": whole}, lambda s, u: min(s["min"] + int(u * (s["max"] - s["min"] + 1)), s["max"])
    ),
    **_CONTINUOUS,
    **{f"q_{name}": _quantized(kind) for name, kind in _CONTINUOUS.items() if not name.startswith("inv_")},
}


@dataclass(frozen=True)
class Parameter:
    """One thing that is varied, or a constant: where it stands in the configuration and what it is drawn from."""

    path: tuple[str, ...]
    kind: str
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its keys, joined by dots."""
        return ".".join(self.path)

    @property
    def is_constant(self) -> bool:
        """Whether it has one value."""
        return self.kind == "constant"

    def at(self, u: float) -> Any:
        """The value below which the share `u` of draws lies; u in [0, 1]."""
        return KINDS[self.kind].quantile(self.settings, u)

    def grid(self) -> list[Any] | None:
        """Every value, or None where they have no end or weights. As W&B's grid, q_uniform leaves `max` out."""
        settings = self.settings
        if self.kind == "constant":
            return [settings["value"]]
        if self.kind == "categorical":
            return list(settings["values"])
        if self.kind == "int_uniform":
            return list(range(settings["min"], settings["max"] + 1))
        if self.kind == "q_uniform":
            low, q = settings["min"], settings["q"]
            steps = range(math.ceil((settings["max"] - low) / q - 1e-9))
            return [low + step * q if isinstance(low + q, int) else float(f"{low + step * q:.12g}") for step in steps]
        return None
