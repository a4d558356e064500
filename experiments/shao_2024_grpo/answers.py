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


def scores_of(answers: Sequence[str], truth: str) -> dict[str, float]:
    """Scores K answers to one sum, K a power of two.

    Returns:
        right: the share of right answers. maj@k and pass@k for k = 1, 2, 4, ..., K: whether the majority of k answers
        is right, and whether one of them is, as means over K / k disjoint sets of answers.
    """
    scores = {"right": fmean(answer == truth for answer in answers)}
    size = 1
    while size <= len(answers):
        sets = [answers[start : start + size] for start in range(0, len(answers), size)]
        scores[f"maj@{size}"] = fmean(majority(chosen, truth) for chosen in sets)
        scores[f"pass@{size}"] = fmean(truth in chosen for chosen in sets)
        size *= 2
    return scores
