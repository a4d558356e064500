"""The paper's curves of a reward over the distance from the initial policy, fitted to points."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import numpy as np

Form = Literal["RL", "best of n"]
RL: Form = "RL"
BEST_OF_N: Form = "best of n"
FORMS = (RL, BEST_OF_N)


@dataclass(frozen=True)
class Fit:
    """A curve of the paper's section 3.1: d is the root of the KL in nats.

    Attributes:
        form: RL: R(d) = d (alpha - beta log d). best of n: R(d) = d (alpha - beta d).
        alpha: The slope of the gain.
        beta: The strength of overoptimization.
        quality: R^2 over the points that the curve was fitted to: 1 - residual / variance.
    """

    form: Form
    alpha: float
    beta: float
    quality: float = 1.0

    def __call__(self, d: float) -> float:
        return d * (self.alpha - self.beta * (math.log(d) if self.form == RL else d)) if d > 0 else 0.0


def fit(form: Form, distances: Sequence[float], rewards: Sequence[float]) -> Fit:
    """Fits a curve by least squares to the points with a distance above 0.

    Raises:
        ValueError: Fewer than three distances above 0 are different, through which any curve would go.
    """
    d, reward = np.asarray(distances, dtype=float), np.asarray(rewards, dtype=float)
    d, reward = d[d > 0], reward[d > 0]
    if len(set(d.tolist())) < 3:
        raise ValueError(
            f"got distances {list(distances)}; three different ones above 0 are needed. Train for more steps."
        )
    columns = np.stack([d, -d * (np.log(d) if form == RL else d)], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(columns, reward, rcond=None)
    residual = reward - columns @ np.array([alpha, beta])
    quality = 1 - float(residual @ residual) / float(((reward - reward.mean()) ** 2).sum())
    return Fit(form, float(alpha), float(beta), quality)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Returns the N - width + 1 means of `width` neighbours; the mean of all values if there are fewer than `width`."""
    width = min(width, len(values))
    return [fmean(values[i : i + width]) for i in range(len(values) - width + 1)]
