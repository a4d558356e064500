"""Statistics over processes: the collectives, weighted means, running moments.

A collective is called by every process.
"""

import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsFloat, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab_common.reward_checks import require_finite

T = TypeVar("T")
Stats: TypeAlias = dict[str, Any]
"""Statistics by name: numbers, tensors, and summaries such as `Mean`."""


def world_size() -> int:
    """Number of processes that train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Number of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def sum_over_ranks(x: Tensor) -> Tensor:
    """Elementwise sum of `x` over all processes, on each of them. Collective; `x` does not change."""
    if world_size() == 1:
        return x
    total = x.detach().clone()
    dist.all_reduce(total)
    return total


def total_over_ranks(x: float, device: torch.device) -> float:
    """The sum of a number over all processes; a single process does not touch the device. Collective."""
    return x if world_size() == 1 else float(sum_over_ranks(torch.tensor(x, dtype=torch.float32, device=device)))


def gather_over_ranks(value: T) -> list[T]:
    """The `value` of every process, in the order of ranks, on each of them. Collective; values must pickle."""
    gathered = [value] * world_size()
    if len(gathered) > 1:
        dist.all_gather_object(gathered, value)
    return gathered


def everywhere(call: Callable[[], None]) -> None:
    """Calls a function in every process; if any raises an error, all processes raise the first one. Collective."""
    failure: Exception | None = None
    try:
        call()
    except Exception as error:  # whatever it is: the other processes would wait for this one
        failure = error
    failures = gather_over_ranks(None if failure is None else _pickled(failure))
    if (first := next((i for i, other in enumerate(failures) if other is not None), None)) is not None:
        raise failure if failure is not None and first == rank() else pickle.loads(cast(bytes, failures[first]))


def _pickled(failure: Exception) -> bytes:
    """An error as bytes; one that does not survive pickling as a RuntimeError that names it."""
    try:
        data = pickle.dumps(failure)
        pickle.loads(data)
    except Exception:  # a constructor with other arguments, or a lock inside
        return pickle.dumps(RuntimeError(f"{type(failure).__name__}: {failure}"))
    return data


@dataclass(frozen=True)
class Mean:
    """A mean that remembers its weight, so that means of unequal parts add up to the mean of the whole.

    Args:
        total: the weighted sum.
        weight: the sum of the weights, such as a count.
    """

    total: Tensor | float
    weight: Tensor | float

    @classmethod
    def of(cls, x: Tensor, mask: Tensor | None = None) -> "Mean":
        """The mean of `x`, or of its positions where `mask` is 1. Stays on the device, so that nothing waits for it."""
        x = x.detach()
        return cls(x.sum(), x.numel()) if mask is None else cls(torch.where(mask.bool(), x, 0.0).sum(), mask.sum())

    def __add__(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.weight + other.weight)

    def __reduce__(self) -> tuple[Any, ...]:
        """Other processes get plain numbers."""
        return type(self), tuple(map(float, vars(self).values()))

    @property
    def value(self) -> float:
        """NaN if nothing was counted."""
        return float(self.total) / float(self.weight) if self.weight else float("nan")


@dataclass(frozen=True)
class Surprise(Mean):
    """How much less likely tokens are than samples of the policy: the mean of -log pi - entropy, nats per token.

    For samples of the policy the expectation of each token's difference is 0, given the tokens before it. So the sum
    over tokens is a martingale, and its squares tell its deviation. `value` is 0 where the mean is within four standard
    errors of 0, and else what it has beyond them. It is negative at a lower temperature and under top_k or top_p.

    Args:
        squares: the sum of the squared differences.
    """

    squares: Tensor | float = 0.0

    @classmethod
    def of_tokens(cls, logprobs: Tensor, entropy: Tensor, mask: Tensor | None = None) -> "Surprise":
        """The surprise of tokens [...], from their log-probabilities, the policy's entropies, and a mask."""
        difference = -(logprobs + entropy).detach()
        mean, squares = Mean.of(difference, mask), Mean.of(difference.square(), mask)
        return cls(mean.total, mean.weight, squares.total)

    def __add__(self, other: Mean) -> "Surprise":
        assert isinstance(other, Surprise)
        return Surprise(self.total + other.total, self.weight + other.weight, self.squares + other.squares)

    @property
    def value(self) -> float:
        """0 if nothing was counted."""
        total, weight, squares = float(self.total), float(self.weight), float(self.squares)
        # A peaked policy may not have shown its rare tokens: one of 4 nats is added.
        beyond = abs(total) - 4 * math.sqrt(squares + 4.0**2)
        return math.copysign(beyond / weight, total) if beyond > 0 else 0.0


@dataclass(frozen=True)
class Variance:
    """A population variance that remembers its count and mean, so that parts add up (Chan et al. 1979).

    Args:
        count: how many numbers there are.
        squares: sum of their squared deviations from the mean.
    """

    count: float
    mean: float
    squares: float

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

    @property
    def varies(self) -> bool:
        """Whether the numbers differ by more than rounding."""
        return self.squares > 1e-20 * self.count * self.mean**2

    @property
    def value(self) -> float:
        """NaN if nothing was counted."""
        return self.squares / self.count if self.count else float("nan")


class Deviation(Variance):
    """A population standard deviation."""

    @property
    def value(self) -> float:
        return super().value ** 0.5


@dataclass(frozen=True)
class Correlation:
    """Pearson's correlation of two quantities that remembers their moments, so that parts add up (Chan et al. 1979).

    Args:
        x: the variance of one quantity.
        y: the other quantity, with the same count.
        products: sum of the products of their deviations from their means.
    """

    x: Variance
    y: Variance
    products: float

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> "Correlation":
        """The correlation of `x` and `y`, both [B]."""
        x, y = x.detach().cpu().double(), y.detach().cpu().double()
        of_x, of_y = Variance.of(x), Variance.of(y)
        return cls(of_x, of_y, float((x - of_x.mean) @ (y - of_y.mean)))

    def __add__(self, other: "Correlation") -> "Correlation":
        x, y = self.x + other.x, self.y + other.y
        deltas = (other.x.mean - self.x.mean) * (other.y.mean - self.y.mean)
        share = self.x.count * other.x.count / x.count if x.count else 0.0
        return Correlation(x, y, self.products + other.products + deltas * share)

    @property
    def value(self) -> float:
        """In [-1, 1]; NaN for fewer than four pairs, and if a quantity varies only by rounding."""
        if self.x.count < 4 or not (self.x.varies and self.y.varies):
            return float("nan")
        return self.products / (self.x.squares * self.y.squares) ** 0.5


Summary = Mean | Variance | Correlation
_KINDS = {kind.__name__: kind for kind in (Mean, Surprise, Variance, Deviation, Correlation)}
_KIND = "kind of summary"


def packed(tree: Any) -> Any:
    """A tree of statistics with a dict in place of each summary, as a checkpoint holds it."""
    if isinstance(tree, Summary):
        return {_KIND: type(tree).__name__, **{name: packed(value) for name, value in vars(tree).items()}}
    if isinstance(tree, Mapping):
        return {name: packed(value) for name, value in tree.items()}
    return [packed(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


def unpacked(tree: Any) -> Any:
    """What `packed` took."""
    if isinstance(tree, Mapping):
        values = {name: unpacked(value) for name, value in tree.items() if name != _KIND}
        return _KINDS[tree[_KIND]](**values) if _KIND in tree else values
    return [unpacked(value) for value in tree] if isinstance(tree, list) else tree


def merge_stats(parts: Iterable[Mapping[str, Any]]) -> Stats:
    """Merges the statistics of several parts into one.

    Args:
        parts: `Mean`, `Variance`, `Deviation` and `Correlation` are added up, 1-D tensors of any length are
            concatenated on the CPU, and plain numbers are averaged over the parts that have them.

    Raises:
        TypeError: a statistic is of another kind, or of different kinds in different parts.
    """
    columns: dict[str, list[Any]] = {}
    for part in parts:
        for key, value in part.items():
            columns.setdefault(key, []).append(value)
    merged = Stats()
    for key, values in columns.items():
        kinds = set(map(_kind, values))
        if len(kinds) > 1 or not (isinstance(values[0], Summary) or kinds <= {"a number", "a 1-D tensor"}):
            raise TypeError(
                f"The statistic {key!r} is {' and '.join(sorted(kinds))}: in every part it must be of one kind: a "
                "number, a 1-D tensor, Mean, Variance, Deviation or Correlation. Give Mean.of(tensor), or float(x), in "
                "each part."
            )
        if isinstance(values[0], Summary):
            merged[key] = sum(values[1:], start=values[0])
        elif isinstance(values[0], Tensor) and values[0].dim() == 1:
            merged[key] = torch.cat([value.detach().cpu() for value in values])
        else:
            merged[key] = sum(map(float, values)) / len(values)
    return merged


def _kind(value: object) -> str:
    if isinstance(value, Tensor) and (value.dim() == 1 or value.numel() != 1):
        return f"a {value.dim()}-D tensor"
    is_number = isinstance(value, Tensor | SupportsFloat)
    return "a number" if is_number else type(value).__name__


def _of_one(number: Any) -> Mean:
    """A mean over one number, on its device; sums of booleans and of half precision are float32."""
    if not isinstance(number, Tensor):
        return Mean(float(number), 1.0)
    return Mean(number.detach() if number.dtype == torch.float64 else number.detach().float(), 1.0)


def on_host(stats: Stats) -> Stats:
    """The statistics with plain numbers in each `Mean`, for which it waits once, and not for each number."""
    means = {name: value for name, value in stats.items() if isinstance(value, Mean)}
    waiting = defaultdict[torch.device, dict[int, Tensor]](dict)
    for number in (number for mean in means.values() for number in vars(mean).values()):
        if isinstance(number, Tensor):
            waiting[number.device][id(number)] = number.reshape(())
    read = dict[int, float]()
    for numbers in waiting.values():
        flat = torch.cat([number[None].view(torch.uint8) for number in numbers.values()]).cpu()
        parts = flat.split([number.itemsize for number in numbers.values()])
        for (key, number), part in zip(numbers.items(), parts, strict=True):
            read[key] = part.clone().view(number.dtype).item()
    known = {name: [read.get(id(number), number) for number in vars(mean).values()] for name, mean in means.items()}
    return stats | {name: type(mean)(*known[name]) for name, mean in means.items()}


def gather_stats(stats: Mapping[str, object]) -> Stats:
    """Merges the statistics of all processes. One collective.

    Returns:
        Numbers and 1-D tensors, equal on all processes.
    """
    own = merge_stats([stats])
    merged = merge_stats(gather_over_ranks(on_host(own) if torch.accelerator.is_available() else own))
    for key, value in merged.items():
        if isinstance(value, Summary):
            merged[key] = value.value
    return merged


class Recorder:
    """Statistics of micro-batches until they are logged, separate for training and evaluation.

    Weighted means (`Mean`) are merged over everything recorded in all processes.
    """

    def __init__(self) -> None:
        self._parts: dict[bool, list[dict[str, object]]] = {True: [], False: []}

    def add(self, stats: Mapping[str, object], *, training: bool) -> None:
        """Record statistics.

        Args:
            stats: Mean, Variance, Deviation, Correlation or 1-D tensors; plain numbers are averaged over the calls.
            training: whether they belong to training, or to evaluation.
        """
        parts = self._parts[training]
        parts.append({name: _of_one(x) if _kind(x) == "a number" else x for name, x in stats.items()})
        if len(parts) == 64:
            parts[:] = [merge_stats(parts)]

    def flush(self, *, training: bool) -> dict[str, Any]:
        """The statistics since the last flush, over all processes. Collective."""
        parts = self._parts[training]
        self.drop(training=training)
        return gather_stats(merge_stats(parts))

    def drop(self, *, training: bool) -> None:
        """Forget the statistics since the last flush."""
        self._parts[training] = []


class RunningMoments:
    """Mean and standard deviation of all numbers seen so far, in all processes."""

    def __init__(self) -> None:
        self._seen = Variance(0, 0.0, 0.0)

    @property
    def mean(self) -> float:
        """0 before the first number."""
        return self._seen.mean

    @property
    def std(self) -> float:
        """The sample's standard deviation; 1 until there are two different numbers, so that it can always divide."""
        return (self._seen.squares / (self._seen.count - 1)) ** 0.5 if self._seen.varies else 1.0

    def update(self, x: Tensor) -> None:
        """Adds the numbers of `x`, of any shape, of every process. Collective.

        Raises:
            ValueError: a number is NaN or infinite, in all processes. None of the numbers was added.
        """
        seen = sum(gather_over_ranks(Variance.of(x)), start=self._seen)
        require_finite("RunningMoments", mean=seen.mean, squares=seen.squares)
        self._seen = seen

    def state_dict(self) -> dict[str, float]:
        """Count, mean and squared deviations."""
        return {"count": self._seen.count, "mean": self._seen.mean, "squares": self._seen.squares}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restores what `state_dict` returned; ValueError if it is not finite."""
        require_finite("RunningMoments", **state)
        self._seen = Variance(state["count"], state["mean"], state["squares"])
