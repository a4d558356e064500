"""Statistics of effects that several seeds, and the prompts that they share, were measured on.

An effect is an array [S] or [S, P]: one number for each seed, or for each seed and prompt. Where two settings are
compared, an entry is the difference of the two for the same seed and prompt, so that every test here is a paired one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

RESAMPLES = 9_999
Effects = Sequence[float] | Sequence[Sequence[float]] | np.ndarray
LEVEL = 0.05  # of every test; an interval covers 1 - LEVEL


@dataclass(frozen=True)
class Sample:
    """A mean, its standard error, and what resampling says about their ratio.

    Attributes:
        mean: The mean over seeds and prompts.
        error: Its standard error, over both.
        seeds: The number of seeds.
        ratios: |mean of a resample - mean| / its standard error, ascending, [RESAMPLES].
    """

    mean: float
    error: float
    seeds: int
    ratios: np.ndarray

    def p_value(self, value: float) -> float:
        """The two-sided p-value of the hypothesis that the expected effect is `value`.

        If all numbers are equal, resampling changes nothing, and the p-value is the sign test's, 2^(1 - S).
        """
        distance = abs(self.mean - value)
        if self.error == 0:
            return 1.0 if distance == 0 else 2.0 ** (1 - self.seeds)
        beyond = len(self.ratios) - int(np.searchsorted(self.ratios, distance / self.error))
        return (1 + beyond) / (1 + len(self.ratios))

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """The symmetric interval that covers the expected effect with probability 1 - level; two seeds: infinite."""
        reach = float(np.quantile(self.ratios, 1 - level, method="higher")) * self.error if self.error else 0.0
        return self.mean - reach, self.mean + reach


def bootstrap(effects: Effects, *, resamples: int = RESAMPLES) -> Sample:
    """Resamples seeds, and prompts where there are some, and studentises the mean of each resample.

    This is the symmetric bootstrap-t (Hall 1988, "On symmetric bootstrap confidence intervals"), which covers well with
    few seeds, where percentiles of the bootstrap are too narrow. Rows and columns are resampled independently, as
    crossed random effects need (Owen 2007, "The pigeonhole bootstrap", section 3). The standard error adds the
    variances of the seeds' means and of the prompts' means, which is never too small. The same effects give the same
    result.

    Args:
        effects: [S], or [S, P] with one prompt in each column; S at least 2, finite.
        resamples: Number of resamples.

    Raises:
        ValueError: There are fewer than two seeds, or a number is not finite.
    """
    table = np.atleast_2d(np.asarray(effects, dtype=float).T).T
    if table.ndim != 2 or len(table) < 2 or not np.isfinite(table).all():
        raise ValueError(
            f"got effects of shape {table.shape}, {int((~np.isfinite(table)).sum())} of them not finite; finite "
            "numbers [seeds] or [seeds, prompts] of two seeds at least are needed. Run more seeds, or leave out what "
            "diverged."
        )
    seeds, prompts = table.shape
    rng = np.random.default_rng(0)
    rows = rng.multinomial(seeds, np.full(seeds, 1 / seeds), resamples) / seeds
    columns = rng.multinomial(prompts, np.full(prompts, 1 / prompts), resamples) / prompts
    seed_means, prompt_means = columns @ table.T, rows @ table  # [R, S], [R, P]
    means = (rows * seed_means).sum(1)
    errors = np.sqrt(
        _variance_of_mean(seed_means, rows, means, seeds) + _variance_of_mean(prompt_means, columns, means, prompts)
    )
    mean = float(table.mean())
    error = math.sqrt(_plain_variance_of_mean(table.mean(1)) + _plain_variance_of_mean(table.mean(0)))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.abs(means - mean) / errors
    return Sample(mean, error, seeds, np.sort(np.where(errors > 0, ratios, np.inf)))


def _variance_of_mean(values: np.ndarray, weights: np.ndarray, means: np.ndarray, count: int) -> np.ndarray | float:
    """The squared standard error of weighted means, [R]; 0 for a single column."""
    if count < 2:
        return 0.0
    return (weights * (values - means[:, None]) ** 2).sum(1) / (count - 1)


def _plain_variance_of_mean(values: np.ndarray) -> float:
    return float(values.var(ddof=1)) / len(values) if len(values) > 1 else 0.0


def p_of_little(sample: Sample, margin: float) -> tuple[float, float]:
    """The p-values of two claims about an effect: that its size is below `margin`, and that it is above.

    The first is the test of equivalence by two one-sided tests (Schuirmann 1987): the larger p-value of the two. The
    second is the one-sided p-value against the nearer bound.
    """
    one_sided = [sample.p_value(bound) / 2 for bound in (-margin, margin)]
    inside = [
        p if is_inside else 1 - p
        for p, is_inside in zip(one_sided, (sample.mean > -margin, sample.mean < margin), strict=True)
    ]
    return max(inside), min(1 - p for p in inside)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values of N claims, corrected so that the probability of any false one is bounded (Holm 1979)."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def power_of_difference(sample: Sample, effect: float, level: float = LEVEL) -> float:
    """The probability that a two-sided t-test at the observed error finds an expected effect of this size and sign."""
    if sample.error == 0:
        return 1.0
    freedom, shift = sample.seeds - 1, min(abs(effect) / sample.error, 30.0)  # scipy gives NaN for much larger shifts
    bound = float(stats.t.ppf(1 - level / 2, freedom))
    return float(stats.nct.sf(bound, freedom, shift))


def power_of_little(sample: Sample, margin: float, level: float = LEVEL) -> float:
    """The probability that the test of equivalence finds an expected effect of 0 to be below the margin.

    It is the probability that the t-distributed error of the mean stays within the margin less the test's bound.
    """
    if sample.error == 0:
        return 1.0
    freedom = sample.seeds - 1
    room = margin / sample.error - float(stats.t.ppf(1 - level, freedom))
    return max(0.0, 2 * float(stats.t.cdf(room, freedom)) - 1)
