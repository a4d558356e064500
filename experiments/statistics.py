"""Statistics of effects that several seeds, and the prompts that they share, were measured on.

An effect is an array [S] or [S, P]: one number for each seed, or for each seed and prompt. Where two settings are
compared, an entry is the difference of the two for the same seed and prompt, so that every test here is a paired one.
STATISTICS.md describes the method, and how often it errs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import gammaincinv, ndtr, stdtr, stdtrit

Effects = Sequence[float] | Sequence[Sequence[float]] | np.ndarray
LEVEL = 0.05  # of every test; an interval covers 1 - LEVEL
DIGITS = 12  # of a number; what follows them is an error of arithmetic, in which equal numbers may differ
QUANTILES = 500  # of the distribution of the estimated error, over which powers are averaged


@dataclass(frozen=True)
class Sample:
    """A mean whose error has Student's distribution.

    Attributes:
        mean: The mean over seeds and prompts.
        error: Its standard error, over both.
        freedom: The degrees of freedom of the error.
        seeds: The number of seeds.
    """

    mean: float
    error: float
    freedom: float
    seeds: int

    @property
    def sign_test(self) -> float:
        """The p-value of seeds that are all on one side, 2^(1 - S)."""
        return 2.0 ** (1 - self.seeds)

    def p_value(self, value: float) -> float:
        """The two-sided p-value of the hypothesis that the expected effect is `value`.

        If all numbers are equal, the error is unknown, and the p-value is the sign test's.
        """
        distance = abs(self.mean - value)
        if self.error == 0:
            return 1.0 if distance <= abs(self.mean) / 10**DIGITS else self.sign_test
        return float(2 * stdtr(self.freedom, -distance / self.error))

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """The symmetric interval that covers the expected effect with probability 1 - level."""
        reach = _bound(level / 2, self.freedom) * self.error
        return self.mean - reach, self.mean + reach


def sample_of(effects: Effects, groups: Sequence[str] = ()) -> Sample:
    """Estimates the expected effect from seeds and prompts.

    Args:
        effects: [S], or [S, P] with one prompt in each column; S at least 2, finite.
        groups: The group of each prompt, such as its colour, [P]; empty if each prompt was drawn by itself. Prompts of
            a group share a part of their effect, so that the groups are the units; the mean is still over prompts.

    Raises:
        ValueError: There are fewer than two seeds, a number is not finite, or the groups do not fit the prompts.
    """
    table = np.atleast_2d(np.asarray(effects, dtype=float).T).T
    if table.ndim != 2 or len(table) < 2 or not np.isfinite(table).all():
        raise ValueError(
            f"got effects of shape {table.shape}, {int((~np.isfinite(table)).sum())} of them not finite; finite "
            "numbers [seeds] or [seeds, prompts] of two seeds at least are needed. Run more seeds, or leave out what "
            "diverged."
        )
    if groups:
        names = list(dict.fromkeys(groups))
        if len(groups) != table.shape[1]:
            raise ValueError(
                f"got the groups of {len(groups)} prompts for {table.shape[1]} prompts; each prompt needs its group. "
                "Name every prompt's group, or none."
            )
        table = by_group(table, np.asarray([[group == name for group in groups] for name in names]))
    mean, error, freedom = crossed(table)
    is_constant = np.ptp(table) <= np.abs(table).max() / 10**DIGITS
    return Sample(float(mean), 0.0 if is_constant else float(error), float(freedom), len(table))


def crossed(effects: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The mean of crossed random effects, its standard error and its degrees of freedom.

    Seeds and prompts are both drawn at random: y_sp = mean + a_s + b_p + e_sp. The variance of the mean is
    (MS_seeds + MS_prompts - MS_rest) / (S P), from the mean squares of the two-way analysis of variance (Searle,
    Casella and McCulloch 1992, *Variance Components*, section 4.3). Its degrees of freedom are Satterthwaite's (1946),
    v^2 / sum_i(v_i^2 / d_i) with the three mean squares as v_i. An estimate below one of the first two mean squares,
    which says that seeds or prompts have a negative variance, is raised to it. Where prompts show no variance of their
    own (MS_prompts <= MS_rest), the degrees of freedom are those of the seeds, S - 1, which is the t-test over seeds if
    MS_seeds is the larger mean square.

    Args:
        effects: [..., S, P], S at least 2. With one prompt this is the t-test over seeds.

    Returns:
        Mean, error and degrees of freedom, each [...].
    """
    *_, seeds, prompts = effects.shape
    mean, of_seeds, of_prompts = effects.mean((-1, -2)), effects.mean(-1), effects.mean(-2)
    by_seed = prompts * of_seeds.var(-1, ddof=1)
    if prompts == 1:
        return mean, np.sqrt(by_seed / seeds), np.full(mean.shape, seeds - 1.0)
    by_prompt = seeds * of_prompts.var(-1, ddof=1)
    rest_freedom = (seeds - 1) * (prompts - 1)
    left = effects - of_seeds[..., None] - of_prompts[..., None, :] + mean[..., None, None]
    rest = (left**2).sum((-1, -2)) / rest_freedom
    variance = np.maximum(by_seed + by_prompt - rest, np.maximum(by_seed, by_prompt))
    parts = by_seed**2 / (seeds - 1) + by_prompt**2 / (prompts - 1) + rest**2 / rest_freedom
    freedom = np.where(by_prompt <= rest, seeds - 1.0, variance**2 / np.where(parts > 0, parts, 1.0))
    return mean, np.sqrt(variance / (seeds * prompts)), freedom


def by_group(effects: np.ndarray, members: np.ndarray) -> np.ndarray:
    """Numbers of seeds and groups whose analysis is that of the effects, with groups as the units.

    The number of seed s and group g is m_s + w_g (m_sg - m_s), with the means m_s of the seed and m_sg of its prompts
    in g, and w_g the size of the group over the mean size. A seed keeps its mean over prompts. Large groups count more,
    as in the linearised variance of a ratio (Cochran 1977, *Sampling Techniques*, section 9A.2 on unequal clusters).

    Args:
        effects: [..., S, P].
        members: Whether a prompt is in a group, [G, P]; each prompt is in one.

    Returns:
        [..., S, G]; the means of the groups where these are equally large.
    """
    sizes = members.sum(1)
    of_seeds = effects.mean(-1, keepdims=True)
    of_groups = effects @ members.T / sizes
    return of_seeds + sizes / sizes.mean() * (of_groups - of_seeds)


def p_of_little(sample: Sample, margin: float) -> tuple[float, float]:
    """The p-values of two claims about an effect: that its size is below `margin`, and that it is above.

    The first is the test of equivalence by two one-sided tests (Schuirmann 1987): the larger p-value of the two. The
    second is the probability of a mean at least as far from 0, on either side, if the effect is `margin`.
    """
    if sample.error == 0:
        p = sample.p_value(math.copysign(margin, sample.mean))
        return (p, 1.0) if abs(sample.mean) < margin else (1.0, p)
    near, far = ((abs(sample.mean) + sign * margin) / sample.error for sign in (-1, 1))
    inside = float(stdtr(sample.freedom, near))
    return inside, min(1.0, float(stdtr(sample.freedom, -near)) + float(stdtr(sample.freedom, -far)))


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values of N claims, corrected so that the probability of any false one is bounded (Holm 1979)."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def holm_levels(p_values: Sequence[float], level: float = LEVEL) -> list[float]:
    """For each of N claims, the largest p-value with which it would pass Holm's rule, given those of the others.

    It is level / (N - J), where J of the others pass before it: level / N if none does, level if all do.
    """
    count, levels = len(p_values), []
    for index in range(count):
        others = sorted(p for i, p in enumerate(p_values) if i != index)
        passed = next((i for i, p in enumerate(others) if p > level / (count - i)), len(others))
        levels.append(level / (count - passed))
    return levels


def power_of_difference(sample: Sample, effect: float, level: float = LEVEL) -> float:
    """The probability that the two-sided test at `level` finds an expected effect of this size, with its sign.

    The observed error is taken for the true one; the error that the test would estimate varies around it.
    """
    if sample.error == 0:
        return float(sample.sign_test <= level)
    bound = _bound(level / 2, sample.freedom) * _estimated_errors(sample.freedom)
    return float(ndtr(abs(effect) / sample.error - bound).mean())


def power_of_little(sample: Sample, margin: float, level: float = LEVEL) -> float:
    """The probability that the test of equivalence at `level` finds an expected effect of 0 to be below the margin."""
    if sample.error == 0:
        return float(sample.sign_test <= level)
    room = margin / sample.error - _bound(level, sample.freedom) * _estimated_errors(sample.freedom)
    return float(np.maximum(0.0, 2 * ndtr(room) - 1).mean())


def _bound(level: float, freedom: float) -> float:
    """What Student's t exceeds with probability `level`."""
    return -float(stdtrit(freedom, level))


def _estimated_errors(freedom: float) -> np.ndarray:
    """Quantiles of an estimated standard error over the true one, [QUANTILES]."""
    return np.sqrt(2 * gammaincinv(freedom / 2, (np.arange(QUANTILES) + 0.5) / QUANTILES) / freedom)
