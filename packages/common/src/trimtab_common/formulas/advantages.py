"""Advantages of one action per episode, against the other episodes of its group."""

import torch
from torch import Tensor


def group_centred(scores: Tensor, groups: Tensor) -> Tensor:
    """Score minus the mean of its group (Liu et al. 2025, arXiv:2503.20783: Dr. GRPO).

    Args:
        scores: [B], floating point or integer.
        groups: [B], any integers, equal within a group.

    Returns:
        [B], float.

    Raises:
        ValueError: there is no score, or not one group for each.
    """
    if len(scores) == 0 or scores.shape != groups.shape:
        raise ValueError(
            f"scores has the shape {list(scores.shape)} and groups {list(groups.shape)}: one score at least, and the "
            "group of each, are needed. Leave out a batch without rows."
        )
    scores = scores if scores.is_floating_point() else scores.float()
    _, index = groups.unique(return_inverse=True)
    sums = torch.zeros(int(index.max()) + 1, dtype=scores.dtype, device=scores.device).index_add_(0, index, scores)
    return scores - (sums / index.bincount())[index]


def group_whitened(scores: Tensor, groups: Tensor, *, correction: int = 1) -> Tensor:
    """Score minus the mean of its group, over the group's deviation (Shao et al. 2024, arXiv:2402.03300: GRPO).

    Args:
        scores: [B], as for `group_centred`.
        groups: [B].
        correction: the variance divides by n - correction: 1 for the sample's deviation (GRPO), 0 for the population's
            (DDPO).

    Returns:
        [B], float; 0 in a group whose scores are all equal.
    """
    centred = group_centred(scores, groups)
    _, index = groups.unique(return_inverse=True)
    sizes = index.bincount()
    squares = torch.zeros(len(sizes), dtype=centred.dtype, device=centred.device).index_add_(0, index, centred**2)
    std = (squares / (sizes - correction).clamp(min=1)).sqrt()
    largest = torch.zeros_like(squares).scatter_reduce_(0, index, scores.abs().to(squares.dtype), "amax")
    return _over_deviation(centred, std[index], largest[index])


def batch_scaled(scores: Tensor, groups: Tensor, *, correction: int = 1) -> Tensor:
    """Score minus the mean of its group, over the deviation of all scores (Liu et al. 2025, arXiv:2508.08221).

    The deviation is about the mean of all.

    Args:
        scores: [B], as for `group_centred`.
        groups: [B].
        correction: as for `group_whitened`.

    Returns:
        [B], float; 0 if all scores are equal.
    """
    squares = group_centred(scores, torch.zeros_like(groups)).square().sum()
    std = squares.div(max(len(scores) - correction, 1)).sqrt()
    return _over_deviation(group_centred(scores, groups), std, scores.abs().max())


def leave_one_out(scores: Tensor, groups: Tensor) -> Tensor:
    """Score minus the mean of the others of its group: RLOO (Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740).

    Args:
        scores: [B], as for `group_centred`.
        groups: [B].

    Returns:
        [B], float; 0 where a score is alone in its group.
    """
    centred = group_centred(scores, groups)
    _, index = groups.unique(return_inverse=True)
    sizes = index.bincount()
    return centred * (sizes / (sizes - 1).clamp(min=1))[index]


def _over_deviation(centred: Tensor, std: Tensor, largest: Tensor) -> Tensor:
    rounding = 1e-6 * largest  # of the scores: what is left of equal ones after subtracting their mean
    return torch.where(std <= rounding, 0.0, centred / std.clamp(min=1e-30))
