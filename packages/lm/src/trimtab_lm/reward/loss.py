"""What a reward model learns from pairs, and how well its scores foretell the preferred answer."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from trimtab_lm.tokens.scores import upcast


def pair_loss(chosen: Tensor, rejected: Tensor, *, margin: Tensor | Sequence[float] | float | None = None) -> Tensor:
    """-log s(chosen - rejected - margin) (Llama 2, Touvron et al. 2023, arXiv:2307.09288, Eq. 2).

    chosen, rejected: [B], scores of the two answers. margin: as for `pair_margin`. Returns [B], in float32 at least;
    log 2 if the scores differ by exactly the margin. s is the logistic function.
    """
    difference = torch.sub(*_scores(chosen, rejected))
    return -F.logsigmoid(difference if margin is None else difference - pair_margin(margin, difference))


def pair_margin(margin: Tensor | Sequence[float] | float, pairs: Tensor) -> Tensor:
    """Returns one margin per pair, [B], for `pairs` [B]: from [B], [B, 1], or one number for all pairs.

    Anything else is a ValueError: it would broadcast until every pair met every margin.
    """
    margins = torch.as_tensor(margin, dtype=pairs.dtype, device=pairs.device)
    if margins.dim() and margins.shape not in (pairs.shape, (len(pairs), 1)):
        raise ValueError(
            f"The margin of {len(pairs)} pairs has shape {list(margins.shape)}; it needs one number per pair, "
            f"[{len(pairs)}] or [{len(pairs)}, 1], or one number for all."
        )
    return margins.expand(len(pairs)) if margins.dim() == 0 else margins.flatten()


def centering(chosen: Tensor, rejected: Tensor) -> Tensor:
    """(chosen + rejected)^2: keeps scores around 0, which pairs leave open (Eisenstein et al. 2023, arXiv:2312.09244).

    chosen, rejected: [B], scores. Returns [B], to be weighted and added to the loss.
    """
    return torch.add(*_scores(chosen, rejected)) ** 2


def accuracy(chosen: Tensor, rejected: Tensor) -> Tensor:
    """1 where the chosen answer scores higher, 0 elsewhere: a tie is not a win. All [B]; returns float."""
    chosen, rejected = _scores(chosen, rejected)
    return (chosen > rejected).to(chosen.dtype)


@torch.no_grad()
def calibration(chosen: Tensor, rejected: Tensor, *, bins: int = 10) -> Tensor:
    """Expected calibration error of s(chosen - rejected) as the probability that the chosen answer is better.

    sum over bins of (share of the pairs in it) * |how often right - mean confidence| (Guo et al. 2017,
    arXiv:1706.04599, Eq. 5). The confidence of a pair is s(|difference|), the probability of the answer that scores
    higher; the bins cut [0.5, 1] into equal widths. A tie, of confidence 0.5, is half right.

    chosen, rejected: [B], scores. Returns a scalar in [0, 1]; NaN without pairs. Not a mean over pairs: give it all
    pairs of an evaluation at once.
    """
    difference = torch.sub(*_scores(chosen, rejected))
    confidence = torch.sigmoid(difference.abs())
    right = (difference.sign() + 1) / 2
    index = ((confidence - 0.5) * 2 * bins).long().clamp(max=bins - 1)
    surplus = torch.zeros(bins, dtype=confidence.dtype, device=confidence.device)
    return surplus.index_add_(0, index, right - confidence).abs().sum() / len(confidence)


def _scores(chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor]:
    if chosen.dim() != 1 or chosen.shape != rejected.shape:
        raise ValueError(
            f"Scores of pairs need one shape [B]; got {list(chosen.shape)} for the chosen answers and "
            f"{list(rejected.shape)} for the rejected ones. Squeeze the classifier's logits: logits[:, 0]."
        )
    return upcast(chosen), upcast(rejected)
