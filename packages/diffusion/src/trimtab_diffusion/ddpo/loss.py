"""The objectives of DDPO: score function, importance sampling (the shared surrogate), reward-weighted regression."""

import torch
from torch import Tensor


def score_function_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A log p per step (DDPO-SF, Black et al. 2023, arXiv:2305.13301, Eq. 6): right for the policy that drew alone.

    logprobs, advantages: [B]. Returns [B], to be minimised. Its gradient is that of DDPO-IS at a ratio of 1.
    """
    return -advantages * logprobs


def rwr_weights(rewards: Tensor, groups: Tensor, *, beta: float) -> Tensor:
    """exp(beta r) / Z, Z the mean over a picture's group, so that weights average 1 (Black et al. 2023, Eq. 4 and 5).

    rewards: [B], float; groups: [B], integers, equal for pictures of one prompt. Returns [B]. beta=0 gives
    ones: learning from one's own pictures with no reward at all, the control.
    """
    weights = torch.empty_like(rewards)
    for group in groups.unique():
        own = groups == group
        weights[own] = torch.softmax(beta * rewards[own], 0) * own.sum()
    return weights


def sparse_weights(rewards: Tensor, *, top: float) -> Tensor:
    """1 for the `top` share of rewards [B], 0 for the rest (RWR-sparse, Black et al. 2023, section 4.1). Returns [B].

    At least one picture counts; pictures that tie with the last one do too.
    """
    count = max(1, round(top * len(rewards)))
    return (rewards >= rewards.sort(descending=True).values[count - 1]).to(rewards.dtype)


def denoising_loss(prediction: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """w |prediction - target|^2 per dimension (Black et al. 2023, Eq. 2). [B, ...], [B, ...], [B]; returns [B]."""
    return weights * ((prediction.float() - target.float()) ** 2).flatten(1).mean(1)
