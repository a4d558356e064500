"""The loss of PPO with a value function."""

import torch
from torch import Tensor


def clipped_value_loss(vpreds: Tensor, values: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """max((v - R)^2, (clip(v, v_old +- clip) - R)^2) / 2 per token (Schulman et al. 2017, public code).

    vpreds, values (of the rollout), returns: [...]. Returns [...].
    """
    clipped = values + (vpreds - values).clamp(-clip, clip)
    return 0.5 * torch.maximum((vpreds - returns) ** 2, (clipped - returns) ** 2)
