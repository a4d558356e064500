"""The losses of answers that are labelled desirable or undesirable, by their names in configurations."""

from collections.abc import Callable

import torch
from torch import Tensor


def kto_loss(
    ratios: Tensor,
    labels: Tensor,
    kl: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """lambda_D (1 - s(beta (r - z0))) of desirable answers, lambda_U (1 - s(beta (z0 - r))) of the others.

    Ethayarajh et al. 2024, arXiv:2402.01306, Eq. 7 and 8, with the log-ratio r and the logistic function s. It is
    lambda / 2 where r = z0.

    Args:
        ratios: [B], r = log pi - log ref of each answer, in nats.
        labels: [B], True where the answer is desirable.
        kl: the scalar z0, without gradient and at least 0, in nats.
        beta: how strongly the policy is held to the reference.
        desirable_weight, undesirable_weight: lambda_D and lambda_U.

    Returns:
        The loss of each answer, [B].
    """
    gains = torch.where(labels, ratios - kl, kl - ratios)
    losses = torch.sigmoid(-beta * gains)  # 1 - s(x) = s(-x)
    return torch.where(labels, desirable_weight * losses, undesirable_weight * losses)


def apo_zero_unpaired_loss(ratios: Tensor, labels: Tensor, kl: Tensor, **numbers: float) -> Tensor:
    """lambda_D (1 - s(beta r)) of desirable answers, lambda_U s(beta r) of the others: `kto_loss` with z0 = 0.

    The terms of APO-zero (D'Oosterlinck et al. 2024, arXiv:2408.06266, Eq. 7), each for an answer by itself. The
    arguments are those of `kto_loss`; `kl` is not read.
    """
    return kto_loss(ratios, labels, torch.zeros_like(kl), **numbers)


LOSSES: dict[str, Callable[..., Tensor]] = {"kto": kto_loss, "apo_zero_unpaired": apo_zero_unpaired_loss}
"""The losses under their names in configurations."""

WITHOUT_KL = frozenset({"apo_zero_unpaired"})
"""Losses that do not read z0, so that no mismatched answers are scored."""
