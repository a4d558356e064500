"""Scores answers to a sum: each answer, the majority's answer, and whether any answer is right."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean


def right(completions: Sequence[str], answer: Sequence[int], **_: object) -> list[float]:
    """Returns 1 where the first line of a completion is exactly the answer, else 0."""
    lines = [completion.partition("\n")[0].strip() for completion in completions]
    return [float(line == str(number)) for line, number in zip(lines, answer, strict=True)]


def majority(answers: Sequence[str], truth: str) -> float:
    """Returns 1 if the most frequent answer is the truth; where n answers are equally frequent, 1 / n."""
    counts = Counter(answers)
    most = max(counts.values())
    return float(counts[truth] == most) / sum(count == most for count in counts.values())


def scores_of(answers: Sequence[str], truth: str, probability: float) -> dict[str, float]:
    """Scores a sum by K sampled answers, K a power of two, and by the probability that an answer is right.

    Returns:
        right: the probability. For k = 1, 2, 4, ..., K: pass@k, the probability that one of k independent answers is
        right, 1 - (1 - p)^k; and maj@k, whether the majority of k sampled answers is right, as a mean over K / k
        disjoint sets of answers.
    """
    scores = {"right": probability}
    size = 1
    while size <= len(answers):
        sets = [answers[start : start + size] for start in range(0, len(answers), size)]
        scores[f"maj@{size}"] = fmean(majority(chosen, truth) for chosen in sets)
        scores[f"pass@{size}"] = 1 - (1 - probability) ** size
        size *= 2
    return scores
