"""The clipped surrogate of PPO, and statistics of an update."""

import torch
from torch import Tensor

from trimtab_common.stats import Mean


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per action (Schulman et al. 2017, arXiv:1707.06347, Eq. 7).

    Args:
        log_ratio: [...], log pi - log pi_old of the action taken, in nats.
        advantages: [...].
        clip_low: how far below 1 the ratio is clipped.
        clip_high: how far above 1 the ratio is clipped.
        dual_clip: above 1 + clip_high; bounds r where A < 0, where the loss has no other bound (Ye et al. 2020,
            arXiv:1912.09729, Eq. 5).

    Returns:
        [...], to be minimised.
    """
    return clipped_ratio(log_ratio.exp(), advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def clipped_ratio(
    ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Tensor:
    """The loss of `clipped_surrogate`, from the ratio r [...] itself."""
    bounded = ratio if dual_clip is None else ratio.clamp(max=dual_clip)
    return -torch.minimum(bounded * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


@torch.no_grad()
def surrogate_stats(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> dict[str, Mean]:
    """How far an update moved the actions that count.

    Args:
        log_ratio: [...], as for `clipped_surrogate`.
        advantages: [...].
        mask: [...], 1 where an action counts.
        clip_low: as for `clipped_surrogate`.
        clip_high: as for `clipped_surrogate`.

    Returns:
        `ratio`, the mean of r; `policykl`, the mean of -log r, unbiased for KL(old, new); `approxkl`, the mean of
        log(r)^2 / 2, never negative; `clipfrac`, the share of actions whose gradient the clip stops.
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages < ratio * advantages
    return {
        "ratio": Mean.of(ratio, mask),
        "policykl": Mean.of(-log_ratio, mask),
        "approxkl": Mean.of(0.5 * log_ratio**2, mask),
        "clipfrac": Mean.of(clipped.to(ratio.dtype), mask),
    }
