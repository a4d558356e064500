"""Best-of-n sampling: what it gains, and how far it moves from the policy."""

from collections.abc import Sequence
from functools import cache
from math import log

import numpy as np
from numpy.typing import NDArray


def powers(largest: int) -> list[int]:
    """1, 2, 4, ..., up to `largest`: the numbers of samples that curves over n, or over K, are drawn at."""
    return [2**i for i in range(largest.bit_length())]


def kl_of_best(n: int) -> float:
    """Returns the KL from a policy to the best of n of its samples in nats (Stiennon et al. 2020, appendix G.3).

    It is log n - (n - 1) / n, which is exact if no two samples are equal.
    """
    return log(n) - (n - 1) / n


def expected_best_of(ranked: Sequence[float], n: int) -> float:
    """Estimates the expected value of the best of n without bias (Nakano et al. 2021, arXiv:2112.09332).

    This is the mean, over all subsets of n of the N samples, of the value of the subset's highest-ranked sample.

    Args:
        ranked: The values of the samples, [N], in the order of the proxy's scores, the highest first.
        n: Samples per subset.

    Raises:
        ValueError: n is not between 1 and N.
    """
    total = len(ranked)
    if not 1 <= n <= total:
        raise ValueError(f"the best of {n} was asked of {total} samples. Give 1 <= n <= {total}.")
    return float(np.asarray(ranked, dtype=float) @ chances(total, n))


@cache
def chances(total: int, n: int) -> NDArray[np.float64]:
    """The chance that the sample of each rank is the highest-ranked of a subset of n of `total` samples, [total].

    It is C(total - r, n - 1) / C(total, n) for rank r from 1: n / total for the first, and for each next rank as many
    times as much as the quotient of two neighbouring coefficients.
    """
    left = total - np.arange(1, total, dtype=float)  # samples after rank r
    chance = n / total * np.cumprod(np.concatenate([[1.0], np.maximum(left - n + 1, 0) / left]))
    chance.setflags(write=False)  # the cache shares it
    return chance
