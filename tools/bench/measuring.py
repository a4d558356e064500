"""What a process measures about itself: step times, peak memory, positions read, and the machine's matmul rate."""

import resource
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from tools.bench.sizes import Size
from torch import Tensor, nn
from torch.profiler import profile
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Tokens:
    """The least that a pass over some token sequences must read.

    Attributes:
        read: number of tokens that go through the layers.
        pairs: number of (query, key) position pairs that causal attention compares.
        scored: number of tokens whose probability the head computes.
    """

    read: int
    pairs: int
    scored: int

    @classmethod
    def of(cls, prefix: int, branches: list[int], *, scored: int) -> "Tokens":
        """Counts for sequences that share a prefix, which is read once."""
        pairs = _triangle(prefix) + sum(_triangle(prefix + branch) - _triangle(prefix) for branch in branches)
        return cls(prefix + sum(branches), pairs, scored)

    def __add__(self, other: "Tokens") -> "Tokens":
        return Tokens(self.read + other.read, self.pairs + other.pairs, self.scored + other.scored)

    def forward_flops(self, size: Size) -> int:
        """Returns the multiplications and additions in the matrix products of one forward pass of the size's Llama."""
        llama = {name: int(value) for name, value in size.llama.items()}
        hidden, layers = llama["hidden_size"], llama["num_hidden_layers"]
        share = llama["num_key_value_heads"] / llama["num_attention_heads"]
        layer = int(2 * hidden**2 * (1 + share)) + 3 * hidden * llama["intermediate_size"]
        return (
            2 * layers * layer * self.read
            + 4 * layers * hidden * self.pairs
            + 2 * hidden * llama["vocab_size"] * self.scored
        )


def total(parts: Iterable[Tokens]) -> Tokens:
    """Returns the sum of some counts."""
    return sum(parts, Tokens(0, 0, 0))


def _triangle(length: int) -> int:
    return length * (length + 1) // 2


@dataclass(frozen=True)
class Load:
    """The work that the timed steps of a task require; the same on both sides.

    Attributes:
        units: number of tokens or images in all timed steps.
        unit: "tokens" or "images".
        flops: model FLOPs of all timed steps: the fewest matrix products that the algorithm needs, twice the weights
            for each token forward, twice that backward, no padding, no prompt twice, no recomputation.
    """

    units: int
    unit: str
    flops: float


@dataclass(frozen=True)
class Measurement:
    """A process's report.

    Attributes:
        seconds: wall-clock seconds of each timed step.
        processor_seconds: seconds of processor time in each timed step.
        units, unit, flops: see `Load`.
        memory: peak bytes of the process; on a GPU, peak bytes allocated on the device.
        matmul: FLOPs per second of a large matrix product in this process.
        facts: numbers that must agree on both sides, and what the models read per step: `Clock.read`, or the U-Net's
            rows per image.
    """

    seconds: list[float]
    processor_seconds: list[float]
    units: int
    unit: str
    flops: float
    memory: int
    matmul: float
    facts: Mapping[str, float]


class Clock:
    """Times steps, and counts what models read during them.

    Attributes:
        profiler: advances at the end of each step; None in a process that is timed.
    """

    profiler: ClassVar[profile | None] = None

    def __init__(self, device: str):
        self.device = device
        self.ends: list[float] = []
        self.processor_ends: list[float] = []
        self.counts: list[Tensor] = []
        self.count = torch.zeros(2, dtype=torch.long, device=device)

    def watch(self, *models: PreTrainedModel) -> None:
        """Counts the positions that language models read, and how many of them are not padding (id 0)."""
        for model in models:
            model.get_input_embeddings().register_forward_pre_hook(self._seen)

    def _seen(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        (ids,) = args
        self.count = self.count + torch.stack([torch.ones_like(ids).sum(), (ids != 0).sum()])

    def tick(self) -> None:
        """Ends a step. The first step is a warm-up."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        self.processor_ends.append(time.process_time())
        self.counts.append(self.count)
        if self.profiler:
            self.profiler.step()

    def time(self, step: Callable[[], object], steps: int) -> None:
        """Runs a step once as a warm-up, and then `steps` times."""
        for _ in range(steps + 1):
            step()
            self.tick()

    @property
    def seconds(self) -> list[float]:
        """Wall-clock seconds of each step after the warm-up."""
        return _differences(self.ends)

    @property
    def processor_seconds(self) -> list[float]:
        """Processor seconds of each step after the warm-up."""
        return _differences(self.processor_ends)

    @property
    def read(self) -> dict[str, float]:
        """What the language models read per step, averaged over the steps after the warm-up."""
        positions, tokens = ((self.counts[-1] - self.counts[0]) / len(self.seconds)).tolist()
        return {"positions": positions, "tokens read": tokens}

    def measurement(self, size: Size, load: Load, facts: Mapping[str, float]) -> Measurement:
        """Returns this process's figures; call it after the last step."""
        memory = peak_memory(size.device)  # read before matmul_rate allocates its matrices
        return Measurement(
            seconds=self.seconds,
            processor_seconds=self.processor_seconds,
            units=load.units,
            unit=load.unit,
            flops=load.flops,
            memory=memory,
            matmul=matmul_rate(size),
            facts=facts,
        )


def _differences(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def peak_memory(device: str) -> int:
    """Returns this process's peak memory in bytes; on a GPU, the peak bytes of its tensors."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def matmul_rate(size: Size) -> float:
    """Returns the FLOPs per second of a square matrix product, best of five: float32 on a CPU, bfloat16 on a GPU."""
    dtype = torch.bfloat16 if size.device == "cuda" else torch.float32
    a, b = (torch.randn(size.matmul, size.matmul, device=size.device, dtype=dtype) for _ in range(2))
    clock = Clock(size.device)
    clock.time(lambda: a @ b, 5)
    return 2 * size.matmul**3 / min(clock.seconds if size.device == "cuda" else clock.processor_seconds)
