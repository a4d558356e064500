"""Scores answers to a sum: each answer, the majority's answer, and whether any answer is right."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.polynomial.legendre import leggauss
from numpy.typing import NDArray


def right(completions: Sequence[str], answer: Sequence[int], **_: object) -> list[float]:
    """Returns 1 where the first line of a completion is exactly the answer, else 0."""
    return [float(first_line(text) == str(number)) for text, number in zip(completions, answer, strict=True)]


def is_a_number(completions: Sequence[str], **_: object) -> list[float]:
    """Returns 1 where the first line of a completion is a number alone, right or wrong, else 0."""
    return [float(first_line(text).isdecimal()) for text in completions]


def first_line(completion: str) -> str:
    """The answer that a completion gives, without spaces at its ends."""
    return completion.partition("\n")[0].strip()


def pass_at(k: int, probability: float) -> float:
    """The probability that one of k independent answers is right, each with this probability."""
    return 1 - (1 - probability) ** k


def maj_at(k: int, lines: Mapping[str, float], truth: str) -> float:
    """The probability that the truth is the most frequent of k independent answers; of n equally frequent ones, 1 / n.

    The numbers of answers follow the multinomial distribution. For each number c of right answers, the other lines
    have c answers at most, and t of them have c. The probability is the coefficient of x^k in a product of polynomials,
    one for each line. Its mean of 1 / (1 + t) is the integral of y^t over y from 0 to 1, where y counts the lines that
    have c answers.

    Args:
        k: The number of answers.
        lines: The probability of each line. Lines that are missing, up to a sum of 1, count as different from all
            others.
        truth: The right line.
    """
    right, wrong = lines.get(truth, 0.0), [share for line, share in lines.items() if line != truth]
    rare = max(0.0, 1 - sum(lines.values()))
    nodes, weights = leggauss(k // 2 + 1)  # exact for powers of y to k
    factorials = np.cumprod([1.0, *range(1, k + 1)])
    total = 0.0
    for c in range(1, k + 1):
        counts = np.arange(k - c + 1)  # of answers that are not right
        for y, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
            among = np.where(counts < c, 1.0, np.where(counts == c, y, 0.0)) / factorials[counts]
            product = (rare * (y if c == 1 else 1.0)) ** counts / factorials[counts]
            for share in wrong:
                product = _product(product, among * share**counts)
            total += weight * product[-1] * right**c / factorials[c]
    return float(total * factorials[k])


def _product(first: NDArray[np.float64], second: NDArray[np.float64]) -> NDArray[np.float64]:
    """The product of two polynomials, without powers above theirs."""
    return np.convolve(first, second)[: len(first)]
