"""The loss of PPO with a value function."""

import torch
from torch import Tensor

from trimtab_common.formulas.kl import LOG_RATIO_CLAMP
from trimtab_common.formulas.masking import masked_mean
from trimtab_common.formulas.surrogate import clipped_surrogate, surrogate_stats
from trimtab_common.stats import Mean


def clipped_value_loss(vpreds: Tensor, values: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """max((v - R)^2, (clip(v, v_old +- clip) - R)^2) / 2 per token (Schulman et al. 2017, public code).

    vpreds, values (of the rollout), returns: [...]. Returns [...].
    """
    clipped = values + (vpreds - values).clamp(-clip, clip)
    return 0.5 * torch.maximum((vpreds - returns) ** 2, (clipped - returns) ** 2)


def policy_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log pi - log pi_old of the tokens, 0 where the mask is 0; all [b, R].

    A log-ratio beyond +-20 is taken as that, and gives no gradient.
    """
    return ((logprobs - old_logprobs) * mask).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def ppo_loss(
    *,
    log_ratio: Tensor,
    advantages: Tensor,
    values: Tensor,
    vpreds: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip: float,
    value_clip: float,
    value_weight: float,
) -> tuple[Tensor, Tensor, dict[str, Mean]]:
    """Policy loss and weighted value loss, means over the tokens that count (Schulman et al. 2017, Eq. 9, no bonus).

    log_ratio: of `policy_log_ratio`; values: of the rollout; all [b, R], mask 1 where a token counts. Returns two
    scalars, and statistics of the tokens.
    """
    policy_losses = clipped_surrogate(log_ratio, advantages, clip_low=clip, clip_high=clip)
    value_losses = clipped_value_loss(vpreds, values, returns, clip=value_clip)
    moves = surrogate_stats(log_ratio, advantages, mask, clip_low=clip, clip_high=clip)
    stats = {
        "loss/policy": Mean.of(policy_losses, mask),
        "loss/value": Mean.of(value_losses, mask),
        "loss/total": Mean.of(policy_losses + value_weight * value_losses, mask),
        **{f"policy/{name}": mean for name, mean in moves.items()},
        "val/vpred": Mean.of(vpreds, mask),
        "val/error": Mean.of((vpreds - returns) ** 2, mask),
        "val/clipfrac": Mean.of(((vpreds - values).abs() > value_clip).to(vpreds.dtype), mask),
    }
    return masked_mean(policy_losses, mask), value_weight * masked_mean(value_losses, mask), stats
