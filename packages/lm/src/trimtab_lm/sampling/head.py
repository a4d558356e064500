"""The LM head of a decoding step on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trimtab_common.compat.fsdp import forward_hooks
from trimtab_lm.interface import Model
from trimtab_lm.tokens.logprobs import forward_replaced, is_linear

FEWEST_STEPS = 8
"""Decoding steps from which the copy pays."""
COPIED_ROWS = 512
"""Rows of a weight that are transposed at a time, which stay in the cache."""


@contextmanager
def head_by_columns(model: Model, steps: int) -> Iterator[None]:
    """Inside the block a float32 head on a CPU multiplies by a transposed copy of its weight.

    A product of few rows then takes 0.6 of the time (4 rows) to 0.8 (32 rows), because the weight is not packed anew.
    The copy takes as long as five steps save.

    Args:
        model: the model; its head does not change inside the block.
        steps: the most decoding steps of the block; with less than `FEWEST_STEPS` nothing is copied.
    """
    head = model.get_output_embeddings()
    if steps < FEWEST_STEPS or not _is_float32_on_cpu(head):
        yield
        return
    columns = transposed(head.weight.detach())
    with forward_replaced(head, lambda _, hidden: (_by_columns(columns, head.bias, hidden),)):
        yield


def transposed(weight: Tensor) -> Tensor:
    """A copy of a matrix [V, H] as [H, V]."""
    columns = weight.new_empty(weight.shape[::-1])
    for rows, copy in zip(weight.split(COPIED_ROWS), columns.split(COPIED_ROWS, 1), strict=True):
        copy.copy_(rows.t())
    return columns


def _by_columns(columns: Tensor, bias: Tensor | None, hidden: Tensor) -> Tensor:
    logits = hidden @ columns
    return logits if bias is None else logits.add_(bias)


def _is_float32_on_cpu(head: nn.Module | None) -> bool:
    """Whether there is a head, a plain linear layer of float32 on a CPU, whose weight no engine or hook brings."""
    return (
        type(head) is nn.Linear
        and is_linear(head, head.forward)
        and not forward_hooks(head)[0]
        and head.weight.device.type == "cpu"
        and head.weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
    )
