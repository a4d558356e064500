"""The formulas of DiffusionNFT (Zheng et al. 2025, arXiv:2509.16117)."""

from collections.abc import Callable

from torch import Tensor

Distance = Callable[[Tensor, Tensor], Tensor]
"""From a prediction and its target, both [B, ...], to [B]."""
LEAST_ERROR = 1e-5
"""The least mean absolute error that `self_normalized` divides by."""


def optimality(advantages: Tensor, *, largest: float) -> Tensor:
    """r = 1/2 + 1/2 clip(A / largest, -1, 1), the probability that a sample is optimal (section 3.3).

    The paper divides the centred reward by Z; with A = the centred reward / s, Z = largest x s.

    Args:
        advantages: [B], rewards minus the mean of their prompt, over a deviation.
        largest: the advantage from which r is 1.

    Returns:
        [B], within [0, 1]; 1/2 for an average sample.
    """
    return 0.5 + 0.5 * (advantages / largest).clamp(-1, 1)


def nft_loss(
    prediction: Tensor, old_prediction: Tensor, target: Tensor, optimality: Tensor, *, beta: float, distance: Distance
) -> Tensor:
    """r |v+ - v|^2 + (1 - r) |v- - v|^2 (Eq. 5).

    The implicit policies are v+ = (1 - beta) v_old + beta v_theta and v- = (1 + beta) v_old - beta v_theta. With
    `mean_square` the loss equals, up to a constant,

        beta^2 |v_theta - (v_old + (2r - 1) / beta (v - v_old))|^2,

    a regression of v_theta. Four cases follow:

    - At v_theta = v_old the gradient is (2r - 1) beta times that of supervised training, |v_theta - v|^2.
    - r = 1 and beta = 1: it is supervised training on the samples.
    - r = (1 + beta) / 2 for all samples: its gradient is beta^2 times that of supervised training, at every v_theta.
    - r = 1/2 for all samples, as group-normalised equal rewards have: it regresses on v_old, with no gradient there.

    Args:
        prediction: [B, ...], v_theta; or all three are predictions of x_0.
        old_prediction: [B, ...], v_old, without a gradient.
        target: [B, ...], v.
        optimality: [B], r.
        beta: the inverse of the guidance's strength.
        distance: `mean_square` or `self_normalized`.

    Returns:
        [B].
    """
    change = beta * (prediction - old_prediction)
    positive, negative = old_prediction + change, old_prediction - change
    return optimality * distance(positive, target) + (1 - optimality) * distance(negative, target)


def mean_square(prediction: Tensor, target: Tensor) -> Tensor:
    """|prediction - target|^2 per dimension, [B]."""
    return (prediction - target).square().flatten(1).mean(1)


def self_normalized(prediction: Tensor, target: Tensor) -> Tensor:
    """|x - x_0|^2 per dimension, over the mean of |x - x_0|, which has no gradient (section 3.3), [B].

    For errors that are all of one size the value is that size.
    """
    size = (prediction - target).detach().abs().flatten(1).mean(1).clamp(min=LEAST_ERROR)
    return mean_square(prediction, target) / size


def old_decay(iteration: int, *, start: int, rate: float, largest: float) -> float:
    """eta_i = min((i - start) rate, largest), and 0 before start: the decay of the sampling policy (section 3.3).

    The paper's usual choice is min(0.001 i, 0.5).

    Args:
        iteration: i, the number of iterations done.
        start: the iterations after which the decay grows from 0.
        rate: its growth per iteration.
        largest: its bound.
    """
    return min(max(iteration - start, 0) * rate, largest)
