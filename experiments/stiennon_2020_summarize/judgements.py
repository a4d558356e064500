"""Accuracy by data and by model size (Stiennon et al. 2020, arXiv:2009.01325, figure 6), for heads on frozen models.

Linear heads learn which of two answers to an instruction was preferred. The judgements are those of
`experiments.assets.preferences`: Claude's, collected for AlpacaEval (CC BY-NC 4.0). Cost and numbers: README.md.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from experiments.assets import model_folder, preferences
from experiments.assets.registry import build_once, cache_dir
from experiments.frozen import choice_regression, mean_states
from experiments.reports import report_on_run
from experiments.run_folders import append, close_folder, from_recipe, open_folder, write_per_prompt
from experiments.stiennon_2020_summarize.report import CLAIM, LONGER, PAPER, TITLE, judged, read
from trimtab_common.config import to_flat_dict
from trimtab_common.tracking import start_tracking

RECIPE = Path(__file__).with_name("recipe_judgements.yaml")
PART = 1024  # texts whose states are cached together
Pairs = Sequence[Mapping[str, str]]


@dataclass
class JudgementsConfig:
    """The settings of a run."""

    seed: int = field(default=0, metadata={"help": "Determines the order of the judgements."})
    models: tuple[str, ...] = field(
        default=("stories15m",),
        metadata={"help": "Frozen models whose states a head learns from: stories15m, minilm, smollm2 or a folder."},
    )
    pairs: tuple[int, ...] = field(
        default=(128, 256, 512, 1024, 2048), metadata={"help": "Judgements that each head learns from."}
    )
    pool: int = field(default=4096, metadata={"help": "Judgements that those of all seeds are drawn from."})
    held_out: float = field(default=0.1, metadata={"help": "Share of the instructions whose judgements are held out."})
    held_out_pairs: int = field(default=1024, metadata={"help": "Judgements about them that measure the accuracy."})
    penalty: float = field(default=100.0, metadata={"help": "Weight of |w|^2 / 2 in the head's loss."})
    tokens: int = field(default=96, metadata={"help": "Tokens of an answer that the frozen models read."})
    output_dir: str = field(default="runs/stiennon_2020_summarize", metadata={"help": "Where the run's files go."})
    log_with: str | None = field(default=None, metadata={"help": "Tracker: wandb, another of accelerate's, or none."})
    tracker_kwargs: dict[str, Any] = field(default_factory=dict, metadata={"help": "Arguments of wandb.init."})

    def __post_init__(self) -> None:
        for name in ("models", "pairs"):
            if not getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)} is empty: give one or more.")
        if min(self.pairs) < 1 or max(self.pairs) > self.pool:
            raise ValueError(
                f"pairs={self.pairs} has to be numbers of 1 to pool={self.pool}. Lower them, or raise pool."
            )


def settings(argv: Sequence[str] | None = None, **changes: object) -> tuple[JudgementsConfig]:
    """The settings of a run: see `from_recipe`."""
    return from_recipe(RECIPE, JudgementsConfig, argv=argv, **changes)


def main(config: JudgementsConfig) -> None:
    """Learns the heads on each model, and writes the run's report into its folder."""
    transformers.logging.set_verbosity_error()
    folder, about = Path(config.output_dir), to_flat_dict(config)
    open_folder(folder, about, goes_on=False)
    options = {"project": PAPER, "config": about, "folder": folder, "init_kwargs": config.tracker_kwargs}
    with start_tracking(config.log_with, **options) as tracker:
        per_prompt = learn_judgements(config)
        summary = {name: fmean(values) for name, values in per_prompt.items()}
        for count in sorted(config.pairs):
            row = {f"accuracy/{Path(model).name}": summary[judged(model, count)] for model in config.models}
            append(folder, {"step": count, **row})
            tracker.log(row, count)
        cells = [[model, *(summary[judged(model, count)] for count in config.pairs)] for model in config.models]
        tracker.table("accuracy", ["model", *map(str, config.pairs)], cells, max(config.pairs))
        tracker.finish({f"final/{name}": value for name, value in summary.items()})
    write_per_prompt(folder, per_prompt)
    close_folder(folder, summary)
    report_on_run(TITLE, CLAIM, read, [folder])


def learn_judgements(config: JudgementsConfig) -> dict[str, list[float]]:
    """Learns a head on each model from each number of judgements; measures its accuracy for each held-out instruction.

    A head learns from the first of the judgements, in an order of the seed, so that heads of more judgements learn from
    those of fewer, too.

    Returns:
        judged_<model>_<judgements> -> the accuracy for each instruction; and judged_longer, that of preferring the
        longer answer. The instructions are the same for all models and seeds.

    Raises:
        ValueError: There are fewer judgements than the settings ask for.
    """
    splits = preferences("claude", held_out=config.held_out)
    parts = {}
    for name, split, size in (("pool", "train", config.pool), ("held_out_pairs", "test", config.held_out_pairs)):
        if size > len(splits[split]):
            raise ValueError(
                f"{name}={size} needs more than the {len(splits[split])} judgements that there are. Lower it."
            )
        parts[split] = [dict(row) for row in splits[split].select(range(size))]
    order = random.Random(config.seed).sample(parts["train"], config.pool)
    shorter = torch.tensor([float(len(row["chosen"]) > len(row["rejected"])) for row in parts["test"]])
    accuracies = {LONGER: by_instruction(parts["test"], shorter)}
    texts = list(dict.fromkeys(row[side] for rows in parts.values() for row in rows for side in ("chosen", "rejected")))
    for model in config.models:
        read_states = states_of(model, texts, config.tokens, seed=config.seed)
        deviation, states = read_states.std(0), dict(zip(texts, read_states, strict=True))
        others = gaps(parts["test"], states) / deviation
        for count in sorted(config.pairs):
            inputs = gaps(order[:count], states) / deviation
            scores = others @ choice_regression(inputs[:, None], penalty=config.penalty)
            right = (scores > 0) + 0.5 * (scores == 0)
            accuracies[judged(model, count)] = by_instruction(parts["test"], right)
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


if __name__ == "__main__":
    main(*settings())
