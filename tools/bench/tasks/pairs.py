"""Preference pairs for DPO and the reward model; a prompt has twice as many tokens as an answer."""

from datasets import Dataset
from tools.bench.measuring import Tokens, total
from tools.bench.models import EOS, text
from tools.bench.sizes import Size, token_ids

Pair = tuple[list[int], list[int], list[int]]
"""Prompt, chosen and rejected answer. Answers end with EOS."""


def pairs_of(size: Size) -> list[Pair]:
    """Returns the pairs of all steps."""
    count = size.rows * (size.steps + 1)
    prompts, chosen, rejected = (token_ids(size, count, seed=seed) for seed in (10, 11, 12))
    return [
        (prompt[: max(2 * len(prompt) // 3, 1)], [*one[: len(one) // 3], EOS], [*other[: len(other) // 3], EOS])
        for prompt, one, other in zip(prompts, chosen, rejected, strict=True)
    ]


def dataset(pairs: list[Pair]) -> Dataset:
    """Returns the pairs as a dataset with the columns prompt, chosen and rejected."""
    rows = [dict(zip(("prompt", "chosen", "rejected"), map(text, pair), strict=True)) for pair in pairs]
    return Dataset.from_list([row | {side: " " + row[side] for side in ("chosen", "rejected")} for row in rows])


def needed(pairs: list[Pair], *, scores_answers: bool) -> Tokens:
    """Returns what one pass must read; each prompt is read once."""
    return total(
        Tokens.of(len(prompt), [len(one), len(other)], scored=(len(one) + len(other)) * scores_answers)
        for prompt, one, other in pairs
    )
