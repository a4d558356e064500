"""Comparisons of a model's answers, and the simulated labeller."""

import random
from collections.abc import Callable, Sequence
from math import exp
from operator import add
from pathlib import Path

from accelerate import PartialState
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from experiments.gold import load_gold
from trimtab_lm.rewards.model import RewardModel

Gold = Callable[[Sequence[str], Sequence[str]], Sequence[float]]
"""gold(prompts, answers) -> the true score of each answer, by which the labeller compares."""


def gold_score(name: str) -> Gold:
    """Returns the gold score: minilm, which reads prompt and answer; or a reward model by its hub id or folder."""
    device = PartialState().device
    if name == "minilm":
        score = load_gold(name, device)
        return lambda prompts, answers: score([*map(add, prompts, answers)])
    return RewardModel(name, device=device)


def splits(name: str, columns: Sequence[str]) -> tuple[Dataset, Dataset]:
    """Loads the splits train, and test or validation, of a dataset.

    Args:
        name: Hub id, folder of data files, or folder that `save_to_disk` wrote.
        columns: The columns to keep.

    Returns:
        The training data and the held-out data.

    Raises:
        ValueError: A split or a column is missing.
    """
    dataset = load_from_disk(name) if (Path(name) / "dataset_dict.json").exists() else load_dataset(name)
    held_out = next((split for split in ("test", "validation") if split in dataset), None)
    if not isinstance(dataset, DatasetDict) or "train" not in dataset or held_out is None:
        raise ValueError(
            f"{name} has the splits {sorted(dataset)}; train is needed, and test or validation. Rename its splits."
        )
    if missing := set(columns).difference(dataset["train"].column_names):
        raise ValueError(
            f"{name} has the columns {dataset['train'].column_names} and lacks {sorted(missing)}; texts called "
            f"{', '.join(columns)} are needed. Rename its columns."
        )
    return dataset["train"].select_columns(columns), dataset[held_out].select_columns(columns)


def preferred_first(first: float, second: float, *, temperature: float, rng: random.Random) -> bool:
    """Samples whether the labeller prefers the first of two answers (Bradley & Terry 1952).

    The probability is s((first - second) / temperature), where s is the logistic function. At temperature 0 the
    labeller prefers the higher score. Equal scores have probability 1/2.

    Args:
        first: The gold score of the first answer.
        second: The gold score of the second answer.
        temperature: In units of the gold score.
        rng: The source of randomness.
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
    """Labels pairs of answers; leaves out pairs with an empty answer and pairs of equal answers.

    Args:
        prompts: N texts.
        pairs: Two answers to each prompt.
        golds: The gold scores of each pair.
        temperature: See `preferred_first`.
        seed: Determines the labels.

    Returns:
        A dataset with the columns prompt, chosen, rejected, gold_chosen and gold_rejected.
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
