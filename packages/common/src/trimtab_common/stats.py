"""Statistics over processes: the collectives, weighted means, running moments."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Number of processes that train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_over_ranks(x: Tensor) -> Tensor:
    """Elementwise sum of `x` over all processes, on each of them. Collective; `x` itself is left alone."""
    if world_size() == 1:
        return x
    total = x.detach().clone()
    dist.all_reduce(total)
    return total


def gather_over_ranks(value: Any) -> list[Any]:
    """The `value` of every process, in the order of ranks, on each of them. Collective; values must pickle."""
    if world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, value)
    return gathered


@dataclass(frozen=True)
class Mean:
    """A mean that remembers its weight, so that means of unequal parts add up to the mean of the whole."""

    total: Tensor | float
    weight: Tensor | float

    @classmethod
    def of(cls, x: Tensor, mask: Tensor | None = None) -> "Mean":
        """The mean of `x`, or of its positions where `mask` is 1. Stays on the device: nothing waits for it."""
        x = x.detach()
        return cls(x.sum(), x.numel()) if mask is None else cls(torch.where(mask.bool(), x, 0.0).sum(), mask.sum())

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.weight + other.weight)

    def cpu(self) -> "Mean":
        return Mean(float(self.total), float(self.weight))

    @property
    def value(self) -> float:
        """NaN if nothing was counted."""
        return float(self.total) / float(self.weight) if self.weight else float("nan")


@dataclass(frozen=True)
class Variance:
    """A population variance that remembers its count and mean: parts add up as of Chan et al. 1979."""

    count: float
    mean: float
    squares: float  # sum of squared deviations from the mean

    @classmethod
    def of(cls, x: Tensor, mask: Tensor | None = None) -> "Variance":
        """The variance of `x`, or of its positions where `mask` is 1."""
        x = (x if mask is None else x[mask.bool()]).detach().cpu().double()
        mean = float(x.mean()) if x.numel() else 0.0
        return cls(x.numel(), mean, float(((x - mean) ** 2).sum()))

    def __add__(self, other: "Variance") -> "Variance":
        count, delta = self.count + other.count, other.mean - self.mean
        if count == 0:
            return self
        squares = self.squares + other.squares + delta**2 * self.count * other.count / count
        return type(self)(count, self.mean + delta * other.count / count, squares)

    def cpu(self) -> "Variance":
        return self

    @property
    def value(self) -> float:
        """NaN if nothing was counted."""
        return self.squares / self.count if self.count else float("nan")


class Deviation(Variance):
    """The standard deviation instead, of the population."""

    @property
    def value(self) -> float:
        return super().value ** 0.5


def merge_stats(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The statistics of several parts as those of the whole.

    `Mean`, `Variance` and `Deviation` are added up by their weights, 1-D tensors (of any length in each part) are
    concatenated on the CPU, plain numbers are averaged over the parts that have them.
    """
    columns: dict[str, list[Any]] = {}
    for part in parts:
        for key, value in part.items():
            columns.setdefault(key, []).append(value)
    merged: dict[str, Any] = {}
    for key, values in columns.items():
        if isinstance(values[0], Mean | Variance):
            merged[key] = sum(values[1:], start=values[0])
        elif isinstance(values[0], Tensor) and values[0].dim() == 1:
            merged[key] = torch.cat([value.detach().cpu() for value in values])
        else:
            merged[key] = sum(float(value) for value in values) / len(values)
    return merged


def gather_stats(stats: Mapping[str, Any]) -> dict[str, Any]:
    """The statistics of all processes, equal on each of them, gathered in one collective.

    Merged as by `merge_stats`; each `Mean`, `Variance` and `Deviation` is then its number.
    """
    parts = gather_over_ranks({key: _on_cpu(value) for key, value in stats.items()})
    return {k: v.value if isinstance(v, Mean | Variance) else v for k, v in merge_stats(parts).items()}


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    return value.cpu() if isinstance(value, Mean | Variance) else value


class RunningMoments:
    """Mean and standard deviation of all numbers seen so far, in all processes."""

    def __init__(self) -> None:
        self._seen = Variance(0, 0.0, 0.0)

    @property
    def mean(self) -> float:
        return self._seen.mean

    @property
    def std(self) -> float:
        """Sample standard deviation; 1 until two different numbers were seen, so that it can always divide."""
        return (self._seen.squares / (self._seen.count - 1)) ** 0.5 if self._seen.squares else 1.0

    def update(self, x: Tensor) -> None:
        """Take in `x`, of any shape, from every process. Collective."""
        for part in gather_over_ranks(Variance.of(x)):
            self._seen += part

    def state_dict(self) -> dict[str, float]:
        return {"count": self._seen.count, "mean": self._seen.mean, "squares": self._seen.squares}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._seen = Variance(state["count"], state["mean"], state["squares"])
