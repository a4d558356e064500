"""Statistics over masked positions: those with mask 1 count.

Every mask is 1 where a position counts and has the shape of its tensor. A collective is called by every process.
"""

import torch
from torch import Tensor

from trimtab_common.stats import sum_over_ranks

VARIANCE_FLOOR = 1e-8
ROUNDING = 1e-6  # of the mean: what rounding leaves of the deviation of a constant


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of `x` where `mask` is 1; scalar, in the dtype of `x`; 0 for an empty mask.

    Values outside the mask never matter, not even infinity or NaN.
    """
    return torch.where(mask.bool(), x, 0.0).sum() / mask.sum().clamp(min=1)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Population variance of `x` where `mask` is 1; scalar, in the dtype of `x`."""
    return masked_mean((x - masked_mean(x, mask)) ** 2, mask)


def global_mean(x: Tensor, mask: Tensor) -> Tensor:
    """`masked_mean` over the positions of every process. Collective."""
    count = mask.sum().to(x.dtype)
    total, count = sum_over_ranks(torch.stack([torch.where(mask.bool(), x, 0.0).sum(), count])).unbind()
    return total / count.clamp(min=1)


def _moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance over the positions of every process, and whether they vary by more than rounding errors."""
    mean = global_mean(x, mask)
    variance = global_mean((x - mean) ** 2, mask)
    return mean, variance, ~(variance <= (ROUNDING * mean) ** 2)  # NaN varies, so that it is not hidden


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """`x` with mean 0 and variance 1 over the mask of every process; exactly 0 outside. Collective.

    The variance is the population's (Ziegler et al. 2019, arXiv:1909.08593, OpenAI's code).

    Returns:
        Shape and dtype of `x`; 0 for a constant `x`.
    """
    mean, variance, varies = _moments(x, mask)
    return torch.where(mask.bool() & varies, (x - mean) * torch.rsqrt(variance + VARIANCE_FLOOR), 0.0)


def rescale(x: Tensor, mask: Tensor) -> Tensor:
    """`x` with variance 1 and the mean that it has: (x - mean) / deviation + mean; exactly 0 outside. Collective."""
    return torch.where(mask.bool(), whiten(x, mask) + global_mean(x, mask), 0.0)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - Var[returns - values] / Var[returns] over the mask of every process. Collective.

    Returns:
        A scalar: 1 where the values predict the returns, 0 where they are no better than the mean, less where they are
        worse; 0 for constant returns.
    """
    _, unexplained, _ = _moments(returns - values, mask)
    _, total, varies = _moments(returns, mask)
    return torch.where(varies, 1 - unexplained / total.clamp(min=1e-30), 0.0)
