"""The paper's curve of a reward over the distance from the initial policy, fitted to points."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np


@dataclass(frozen=True)
class Fit:
    """R(d) = d (alpha - beta log d), the paper's form for reinforcement learning; d is the root of the KL in nats."""

    alpha: float
    beta: float

    def __call__(self, d: float) -> float:
        return d * (self.alpha - self.beta * math.log(d)) if d > 0 else 0.0

    @property
    def peak(self) -> float:
        """The d of the highest R, where the slope alpha - beta - beta log d is 0; infinite if R only rises."""
        return math.exp(self.alpha / self.beta - 1) if self.beta > 0 else math.inf


def fit(distances: Sequence[float], rewards: Sequence[float]) -> Fit:
    """Fits the curve by least squares to the points with a distance above 0.

    Raises:
        ValueError: Fewer than two distances above 0 are different.
    """
    d, reward = np.asarray(distances, dtype=float), np.asarray(rewards, dtype=float)
    d, reward = d[d > 0], reward[d > 0]
    if len(set(d.tolist())) < 2:
        raise ValueError(
            f"got distances {list(distances)}; two different ones above 0 are needed. Train for more steps."
        )
    (alpha, beta), *_ = np.linalg.lstsq(np.stack([d, -d * np.log(d)], axis=1), reward, rcond=None)
    return Fit(float(alpha), float(beta))


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Returns the N - width + 1 means of `width` neighbours; the mean of all values if there are fewer than `width`."""
    width = min(width, len(values))
    return [fmean(values[i : i + width]) for i in range(len(values) - width + 1)]
