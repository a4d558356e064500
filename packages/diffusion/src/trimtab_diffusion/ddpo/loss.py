"""The objectives of DDPO: score function, importance sampling (the shared surrogate), reward-weighted regression."""

import torch
from torch import Tensor


def score_function_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A log p per step (DDPO-SF, Black et al. 2023, arXiv:2305.13301, Eq. 6).

    It is right only for the policy that sampled; there its gradient is that of DDPO-IS.

    Args:
        logprobs: [B], nats.
        advantages: [B].

    Returns:
        [B], to be minimised.
    """
    return -advantages * logprobs


def rwr_weights(rewards: Tensor, groups: Tensor, *, beta: float) -> Tensor:
    """exp(beta r) / Z, with Z the mean over a sample's group, so that weights average 1 (Black et al. 2023, Eqs. 4, 5).

    Args:
        rewards: [B], float.
        groups: [B], integers, equal for samples of one prompt.
        beta: inverse temperature; 0 gives ones, which is the control that learns without a reward.

    Returns:
        [B].
    """
    weights = torch.empty_like(rewards)
    for group in groups.unique():
        members = groups == group
        weights[members] = torch.softmax(beta * rewards[members], 0) * members.sum()
    return weights


def sparse_weights(rewards: Tensor, *, top: float) -> Tensor:
    """1 for the best rewards, 0 for the rest (RWR-sparse, Black et al. 2023, section 4.1).

    Args:
        rewards: [B].
        top: the share that counts; at least one sample counts, and so do samples that tie with the last one.

    Returns:
        [B].
    """
    count = max(1, round(top * len(rewards)))
    return (rewards >= rewards.sort(descending=True).values[count - 1]).to(rewards.dtype)


def denoising_loss(prediction: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """w |prediction - target|^2 per dimension (Black et al. 2023, Eq. 2).

    Args:
        prediction: [B, ...], of the denoiser.
        target: [B, ...].
        weights: [B].

    Returns:
        [B], in float32.
    """
    return weights * ((prediction.float() - target.float()) ** 2).flatten(1).mean(1)
