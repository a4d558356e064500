"""Best-of-n sampling: what it gains, and how far it moves from the policy."""

from collections.abc import Sequence
from math import comb, log


def kl_of_best(n: int) -> float:
    """Returns the KL from a policy to the best of n of its samples in nats (Stiennon et al. 2020, appendix G.3).

    It is log n - (n - 1) / n, which is exact if no two samples are equal.
    """
    return log(n) - (n - 1) / n


def expected_best_of(ranked: Sequence[float], n: int) -> float:
    """Estimates the expected value of the best of n without bias (Nakano et al. 2021, arXiv:2112.09332).

    This is the mean, over all subsets of n of the N samples, of the value of the subset's highest-ranked sample. The
    sample of rank r, from 1, is the highest-ranked of C(N - r, n - 1) of the C(N, n) subsets. n = 1 gives the mean.

    Args:
        ranked: The values of the samples, [N], in the order of the proxy's scores, the highest first.
        n: Samples per subset.

    Raises:
        ValueError: n is not between 1 and N.
    """
    total = len(ranked)
    if not 1 <= n <= total:
        raise ValueError(f"the best of {n} was asked of {total} samples. Give 1 <= n <= {total}.")
    ways = [comb(total - 1 - i, n - 1) for i in range(total)]
    return sum(value * count for value, count in zip(ranked, ways, strict=True)) / comb(total, n)
