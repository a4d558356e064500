"""Reward models of real judgements: linear heads on frozen models, for the paper's accuracy by data and model size.

The judgements are those of `experiments.assets.preferences`: Claude's, of pairs of answers to instructions, collected
for AlpacaEval (CC BY-NC 4.0).
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from experiments.assets import model_folder, preferences
from experiments.assets.registry import build_once, cache_dir
from experiments.frozen import choice_regression, mean_states
from experiments.stiennon_2020_summarize.settings import RunConfig

POOL, TEST = 4096, 1024  # judgements to learn from, and others about other instructions
PART = 1024  # texts whose states are cached together
LONGER = "judged_longer"
Pairs = Sequence[Mapping[str, str]]


def learn_judgements(model: str, run: RunConfig, *, seed: int) -> dict[str, list[float]]:
    """Learns a head from each number of judgements, and measures its accuracy for each held-out instruction.

    A head learns from the first of the judgements, in an order of the seed, so that heads of more judgements learn from
    those of fewer, too.

    Args:
        model: See `model_folder`.
        run: The settings of the run.
        seed: Determines the order of the judgements.

    Returns:
        judged_<model>_<judgements> -> the accuracy for each instruction; and judged_longer, that of preferring the
        longer answer. The instructions are the same for all models and seeds.
    """
    judged = preferences("claude")
    train, test = (
        [dict(row) for row in judged[part].select(range(min(size, len(judged[part]))))]
        for part, size in (("train", POOL), ("test", TEST))
    )
    texts = list(dict.fromkeys(row[side] for row in (*train, *test) for side in ("chosen", "rejected")))
    states = dict(zip(texts, states_of(model, texts, run.judged_tokens, seed=seed), strict=True))
    order = random.Random(seed).sample(train, len(train))
    deviation = torch.stack(list(states.values())).std(0)
    others = gaps(test, states) / deviation
    shorter = torch.tensor([float(len(row["chosen"]) > len(row["rejected"])) for row in test])
    accuracies = {LONGER: by_instruction(test, shorter)}
    for count in sorted(run.judged_pairs):
        if count > len(order):
            raise ValueError(f"judged_pairs={run.judged_pairs} needs more than the {len(order)} judgements. Lower it.")
        inputs = gaps(order[:count], states) / deviation
        weight = choice_regression(inputs[:, None], penalty=run.judged_penalty)
        scores = others @ weight
        accuracies[f"judged_{Path(model).name}_{count}"] = by_instruction(test, (scores > 0) + 0.5 * (scores == 0))
    return accuracies


def states_of(model: str, texts: Sequence[str], tokens: int, *, seed: int) -> Tensor:
    """Returns the mean states of the first `tokens` tokens of each text by a frozen model, [N, D].

    They are cached in parts. Runs with an odd seed begin in the middle, so that of two runs at the same time each reads
    one half.
    """
    parts = [texts[start : start + PART] for start in range(0, len(texts), PART)]
    order = [*range(len(parts))]
    middle = len(parts) // 2 * (seed % 2)
    states = {number: part_of_states(model, parts[number], tokens) for number in order[middle:] + order[:middle]}
    return torch.cat([states[number] for number in order])


def part_of_states(model: str, texts: Sequence[str], tokens: int) -> Tensor:
    """Computes `states_of` for these texts, or reads them from the cache."""
    key = hashlib.sha256("\0".join([model, str(tokens), *texts]).encode()).hexdigest()[:16]

    def build(folder: Path) -> None:
        name = model_folder(model)
        trunk, tokenizer = AutoModel.from_pretrained(name).eval(), AutoTokenizer.from_pretrained(name)
        rows = tokenizer(list(texts), truncation=True, max_length=tokens)["input_ids"]
        save_file({"states": mean_states(trunk, [torch.tensor(ids) for ids in rows])}, folder / "states.safetensors")

    folder = build_once(cache_dir() / "data" / f"states-{key}", build, f"reading {len(texts)} answers with {model}")
    return load_file(folder / "states.safetensors")["states"]


def gaps(pairs: Pairs, states: Mapping[str, Tensor]) -> Tensor:
    """States of the chosen answer minus the rejected one's, [N, D]."""
    return torch.stack([states[row["chosen"]] - states[row["rejected"]] for row in pairs])


def by_instruction(pairs: Pairs, right: Tensor) -> list[float]:
    """The share of correctly ranked pairs, for each instruction in the order of its first pair."""
    shares: dict[str, list[float]] = {}
    for row, value in zip(pairs, right.tolist(), strict=True):
        shares.setdefault(row["prompt"], []).append(float(value))
    return [sum(values) / len(values) for values in shares.values()]
