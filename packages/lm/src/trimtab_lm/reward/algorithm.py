"""A reward model: the chosen answer of each pair should score above the rejected one.

Stiennon et al. 2020, arXiv:2009.01325, Eq. 1. In the model of preferences by Bradley and Terry 1952 the chosen answer
is better with probability s(score of chosen - score of rejected), where s is the logistic function.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .loss import centering, pair_loss


class Comparison(NamedTuple):
    """Losses [B] of B pairs, and scores [B, 2] of their chosen and rejected answers; by_label: [labels, 2, B]."""

    losses: Tensor
    scores: Tensor
    by_label: Tensor


def score(
    model: Callable[..., Any], rows: Mapping[str, Tensor], *, reads_tokens: bool
) -> tuple[Tensor, Tensor | float]:
    """Scores [2B, labels] of sequences, chosen and rejected of each pair in turn, and the loss of a router.

    Args:
        rows: see `collator.pair_rows`.
        reads_tokens: whether the model's forward takes `tokens` and scores each sequence at its end.
    """
    if reads_tokens:
        return model(tokens=rows)
    return model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits, 0.0


def compare(scores: Tensor, *, margin: Tensor | None, center: float | None) -> Comparison:
    """The losses of pairs.

    Args:
        scores: [2B, labels]. Almost every model has one label; each label is a score of its own.
        margin: [B], by how much the scores have to differ, or None.
        center: the weight of `centering`, or None.
    """
    by_label = scores.reshape(len(scores) // 2, 2, -1).permute(2, 1, 0)
    losses = []
    for chosen, rejected in by_label:
        loss = pair_loss(chosen, rejected, margin=margin)
        losses.append(loss if center is None else loss + center * centering(chosen, rejected))
    return Comparison(torch.stack(losses).mean(0), by_label.mean(0).T, by_label)
