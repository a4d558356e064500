"""KTO: the policy learns from single answers, each labelled desirable or undesirable.

Ethayarajh et al. 2024, arXiv:2402.01306: an answer is compared with a reference point z0, an estimate of the KL from
the policy to the reference. A desirable answer should gain more probability than z0, an undesirable one less.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trimtab_common.stats import sum_over_ranks
from trimtab_lm.tokens.dropout import without_dropout
from trimtab_lm.tokens.scores import upcast
from trimtab_lm.tokens.sequences import SequenceScores, score_sequences

from .config import KTOConfig
from .loss import LOSSES

Tokens = Mapping[str, Any]
Reference = Callable[[Tokens], SequenceScores]
"""Scores the sequences of a laid-out batch under the reference, without gradient."""


class Judged(NamedTuple):
    """B answers: losses (a router's included) and implicit rewards [B], the scalar z0, and the policy's scores."""

    losses: Tensor
    rewards: Tensor
    kl: Tensor
    scores: SequenceScores


def compare(model: nn.Module, reference: Reference, batch: Tokens, config: KTOConfig, *, count: int | None) -> Judged:
    """The losses and implicit rewards beta (log pi - log ref) of the answers of a batch.

    Args:
        model: the policy, as it is wrapped.
        batch: see `UnpairedCollator`.
        count: how many rows are real; None: all.
    """
    reference_logps = reference(batch).logps
    kl = reference_logps.new_zeros(())
    if "mismatched" in batch:
        kl = estimate_kl(model, reference, batch["mismatched"], count=count)
    scores = score_sequences(model, batch)
    ratios = upcast(scores.logps) - reference_logps
    weights = {"desirable_weight": config.desirable_weight, "undesirable_weight": config.undesirable_weight}
    losses = LOSSES[config.loss_type](ratios, batch["label"], kl, beta=config.beta, **weights)
    return Judged(losses + scores.router_loss, config.beta * ratios.detach(), kl, scores)


def estimate_kl(model: nn.Module, reference: Reference, mismatched: Tokens, *, count: int | None) -> Tensor:
    """z0 = max(0, mean of log pi(y'|x) - log ref(y'|x)) over prompts x with answers y' to others, on all processes.

    A row that is alone in its batch has no other answer and does not count; z0 is 0 where no row counts. No gradient
    flows through z0, and the policy is scored without dropout. Collective.
    """
    with torch.no_grad(), without_dropout(model):
        logps = score_sequences(model, mismatched).logps
    ratios = upcast(logps) - reference(mismatched).logps
    ratios = ratios[: count if len(ratios) > 1 else 0]
    total, rows = sum_over_ranks(torch.stack([ratios.sum(), ratios.new_tensor(len(ratios))]))
    return (total / rows.clamp(min=1)).clamp(min=0)
