"""Posts with reference answers, comparisons of a model's own answers, and the labeller that stands in for people."""

import random
from collections.abc import Callable, Iterable, Sequence
from math import comb, exp
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from experiments.sentiment import sentiment
from experiments.stiennon_2020_summarize.sft import documents
from trimtab_lm.rewards.model import RewardModel

Gold = Callable[[Sequence[str], Sequence[str]], Sequence[float]]
"""gold(prompts, answers) -> the true score of each answer: what a labeller would like."""


def gold_score(name: str) -> Gold:
    """vader: how positive the answer alone sounds. Else the hub id or folder of a reward model."""
    if name == "vader":
        return lambda prompts, answers: sentiment(answers)
    return RewardModel(name, device=PartialState().device)


def review_starts(reviews: Iterable[str], *, words: int, prompt_words: int) -> Dataset:
    """prompt: a review's first words; completion: how its writer went on, to the last sentence that ends in time.

    words: at most so many in both. Reviews are left out whose first sentence is longer, or which leave fewer words
    for the completion than for the prompt.
    """
    rows = []
    for review in reviews:
        start = next(documents(" ".join(review.split()), words), "").split()
        if 2 * prompt_words <= len(start) <= words:
            rows.append({"prompt": " ".join(start[:prompt_words]), "completion": " " + " ".join(start[prompt_words:])})
    return Dataset.from_list(rows)


def splits(name: str, columns: Sequence[str]) -> tuple[Dataset, Dataset]:
    """What to learn from, and what is held out: the splits train, and test or validation, of a data set.

    name: hub id, folder of data files, or folder that `save_to_disk` wrote.
    """
    found = load_from_disk(name) if (Path(name) / "dataset_dict.json").exists() else load_dataset(name)
    held_out = next((split for split in ("test", "validation") if split in found), None)
    if not isinstance(found, DatasetDict) or "train" not in found or held_out is None:
        raise ValueError(
            f"{name} has the splits {sorted(found)}; train is needed, and test or validation. Rename its splits."
        )
    if missing := set(columns).difference(found["train"].column_names):
        raise ValueError(
            f"{name} has the columns {found['train'].column_names} and lacks {sorted(missing)}; texts called "
            f"{', '.join(columns)} are needed. Rename its columns."
        )
    return found["train"].select_columns(columns), found[held_out].select_columns(columns)


def preferred_first(first: float, second: float, *, temperature: float, rng: random.Random) -> bool:
    """Whether the labeller prefers the first, with probability s((first - second) / temperature).

    s: the logistic function (Bradley & Terry 1952). At temperature 0 the higher score is preferred; a tie is a toss of
    a coin.
    """
    if first == second:
        return rng.random() < 0.5
    if temperature == 0:
        return first > second
    return rng.random() < 1 / (1 + exp(max(-700.0, min(700.0, (second - first) / temperature))))


def compared(
    prompts: Sequence[str],
    pairs: Sequence[tuple[str, str]],
    golds: Sequence[tuple[float, float]],
    *,
    temperature: float,
    seed: int,
) -> Dataset:
    """Columns prompt, chosen, rejected, and the gold score of both; without pairs of which nothing can be learnt.

    Left out are pairs with an empty answer, and pairs of the same answers. temperature: see `preferred_first`.
    """
    rng = random.Random(seed)
    rows = []
    for prompt, answers, scores in zip(prompts, pairs, golds, strict=True):
        if answers[0].strip() == answers[1].strip() or not all(answer.strip() for answer in answers):
            continue
        best = 0 if preferred_first(*scores, temperature=temperature, rng=rng) else 1
        rows.append(
            {
                "prompt": prompt,
                "chosen": answers[best],
                "rejected": answers[1 - best],
                "gold_chosen": scores[best],
                "gold_rejected": scores[1 - best],
            }
        )
    return Dataset.from_list(rows)


def expected_best_of(ranked: Sequence[float], n: int) -> float:
    """Mean over all draws of n of N samples of the value of the one ranked first among the n.

    ranked: [N], values of the samples, those that the proxy likes best first. The sample of rank r is the best of
    C(N - r, n - 1) of the C(N, n) draws, r from 1 (the unbiased estimate of Nakano et al. 2021, arXiv:2112.09332).
    n = 1 gives the mean.
    """
    total = len(ranked)
    if not 1 <= n <= total:
        raise ValueError(f"the best of {n} was asked of {total} samples. Give 1 <= n <= {total}.")
    ways = [comb(total - 1 - i, n - 1) for i in range(total)]
    return sum(value * count for value, count in zip(ranked, ways, strict=True)) / comb(total, n)
