"""IterativeSFT: one pass over the rows that a caller chose, in optimizer steps of several batches."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from trimtab_lm.hf.types import Batch


class Optimizer(Protocol):
    """Takes optimizer steps, each of several batches."""

    def parts(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """The batches of a step."""

    def backward(self, batch: Batch, count: Tensor) -> None:
        """Adds the gradient of a batch's loss, which is divided by `count`."""

    def step(self) -> dict[str, Any]:
        """Changes the weights; returns `grad_norm`, a tensor, and `learning_rate`."""


def batches_of_updates(
    rows: Sequence[Any], collate: Callable[[list[Any]], Batch], *, batch_size: int, accumulation: int, seed: int
) -> list[list[Batch]]:
    """The batches of each update: each row once, in random order.

    Args:
        rows: what the caller passed to `step`, tokenized.
        batch_size: rows of a batch; the last one may be shorter.
        accumulation: batches of an update; the last one may have fewer.
        seed: the order depends on it alone.
    """
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    batches = [collate([rows[i] for i in part]) for part in order.split(batch_size)]
    return [batches[start : start + accumulation] for start in range(0, len(batches), accumulation)]


def update(batches: Sequence[Batch], optimizer: Optimizer, *, count: Tensor) -> dict[str, Any]:
    """One optimizer step: descends -log p, averaged over the tokens of all batches and processes.

    Returns what `Optimizer.step` does, and `num_tokens`.

    Args:
        optimizer: differentiates SFT's loss and takes the step.
        count: how many tokens of all batches and processes have a label.
    """
    for batch in optimizer.parts(batches):
        optimizer.backward(batch, count)
    return optimizer.step() | {"num_tokens": count}
