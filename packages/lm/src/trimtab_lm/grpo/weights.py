"""What a token weighs in the loss of an optimizer step: one function for each `loss_type`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Window:
    """What one optimizer step learns from; completions that are masked count nowhere.

    sequences, tokens: completions and their tokens, over all micro-batches and processes. rank_tokens: tokens of all
    micro-batches of this process. ranks: number of processes.
    """

    sequences: int
    tokens: int
    rank_tokens: int
    ranks: int = 1


def _per_sequence(lengths: Tensor, window: Window, max_completion_length: int) -> Tensor:
    return 1 / (lengths * window.sequences)


def _per_rank_token(lengths: Tensor, window: Window, max_completion_length: int) -> Tensor:
    return torch.ones_like(lengths) / (window.rank_tokens * window.ranks)


def _per_constant(lengths: Tensor, window: Window, max_completion_length: int) -> Tensor:
    return torch.ones_like(lengths) / (window.sequences * max_completion_length)


def _per_token(lengths: Tensor, window: Window, max_completion_length: int) -> Tensor:
    return torch.ones_like(lengths) / window.tokens


NORMALIZATIONS: dict[str, Callable[[Tensor, Window, int], Tensor]] = {
    "grpo": _per_sequence,
    "bnpo": _per_rank_token,
    "dr_grpo": _per_constant,
    "dapo": _per_token,
}
"""The weight of a token of each completion, [S], by `loss_type`; infinite only where there is no token to weigh."""


def token_weights(
    loss_type: str, sequence: Tensor, tokens_per_sequence: Tensor, *, window: Window, max_completion_length: int
) -> Tensor:
    """Weights [N], float32, with which the tokens' losses, summed over the window, are the loss of the step.

    - "grpo": mean over the tokens of each completion, then over completions (Shao et al. 2024, arXiv:2402.03300,
      Eq. 3).
    - "dapo": mean over all tokens of the window, of all processes (Yu et al. 2025, arXiv:2503.14476, Eq. 8).
    - "bnpo": mean over the tokens of each process, then over processes: the mean over the local batch, whose tokens
      weigh more where they are fewer. The local batch is all that a process learns from in the step, not one
      micro-batch, so that accumulation changes nothing; with one process it is "dapo".
    - "dr_grpo": sum over completions x max_completion_length, a constant (Liu et al. 2025, arXiv:2503.20783).

    Whatever the split into micro-batches, the sum is the same. Where gradients are averaged over processes, as DDP and
    FSDP do, multiply it by `window.ranks`.
    """
    if loss_type not in NORMALIZATIONS:
        raise ValueError(f"loss_type={loss_type!r}: choose from {', '.join(NORMALIZATIONS)}.")
    lengths = tokens_per_sequence.float()
    return NORMALIZATIONS[loss_type](lengths, window, max_completion_length)[sequence]
