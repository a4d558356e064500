"""How often a minibatch waits for the device, which must finish its work before the host can read a number."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.lm import tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

READS = (
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.masked_select",
    "aten.equal",
    "aten.repeat_interleave.Tensor",
)
MINIBATCHES = 8


class Reads(TorchDispatchMode):
    """Counts the operations that wait for the device: the host reads their result or their size."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(READS):
            self.counts[str(func)] += 1
        if str(func) == "aten.index.Tensor" and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        ):
            self.counts["index by a mask"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    reads, tolist = Reads(), Tensor.tolist

    def noted(self: Tensor) -> Any:
        reads.counts["tolist"] += 1
        return tolist(self)

    with monkeypatch.context() as patch, reads:
        patch.setattr(Tensor, "tolist", noted)
        yield reads.counts


def reads_of_a_step(monkeypatch: pytest.MonkeyPatch, epochs: int) -> Counter[str]:
    trainer = tiny.ppo(batch_size=2 * MINIBATCHES, mini_batch_size=2, ppo_epochs=epochs)
    batch = tiny.rows(2 * MINIBATCHES, 3, 5), tiny.rows(2 * MINIBATCHES, 2, 4), [0.5] * 2 * MINIBATCHES
    trainer.step(*batch)  # the first step has more checks
    with counted(monkeypatch) as reads:
        trainer.step(*batch)
    return reads


def test_a_minibatch_reads_the_device_twice(monkeypatch: pytest.MonkeyPatch):
    reads = reads_of_a_step(monkeypatch, 3)
    reads.subtract(reads_of_a_step(monkeypatch, 1))
    per_minibatch = {name: count / (2 * MINIBATCHES) for name, count in reads.items() if count}
    # Two read the device: loss and ratio together, and whether the gradient is finite. The others read numbers that the
    # host holds: numbers of rows, lengths, token counts, and on a CPU the documents of a row.
    assert sum(per_minibatch.values()) <= 8
    assert set(per_minibatch) <= {"tolist", "aten._local_scalar_dense.default"}
