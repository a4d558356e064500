"""Samples of runs, good ones and bad ones, for the pages of reports."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.run_folders import SAMPLES, Run

WORST = 3  # samples with the lowest rewards, which the report always shows


def first_and_worst(rewards: Sequence[float], count: int) -> list[int]:
    """The indices of the first `count` rewards and of the WORST lowest, each once: what a table of samples shows."""
    worst = sorted(range(len(rewards)), key=rewards.__getitem__)[:WORST]
    return list(dict.fromkeys([*range(min(count, len(rewards))), *worst]))


def write_samples(folder: Path, columns: Mapping[str, Sequence[Any]], *, rewards: Sequence[float], count: int) -> Any:
    """Writes samples.json, heading -> cells of one for each sample, which `samples_of` reads.

    Args:
        folder: Of the run.
        columns: Heading -> cells [N].
        rewards: [N], by which the worst are chosen; see `first_and_worst`.
        count: How many are shown from the first on.

    Returns:
        The columns of the chosen samples.
    """
    chosen = first_and_worst(rewards, count)
    samples = {heading: [cells[i] for i in chosen] for heading, cells in columns.items()}
    (folder / SAMPLES).write_text(json.dumps(samples, indent=2) + "\n", encoding="utf-8")
    return samples


def write_answers(
    folder: Path,
    prompts: Sequence[str],
    before: Sequence[str],
    after: Sequence[str],
    rewards: Sequence[float],
    count: int,
) -> Any:
    """`write_samples` of answers, in columns query, before, after and reward, each answer on one line."""
    old, new = ([" ".join(text.split()) for text in texts] for texts in (before, after))
    columns = {"query": prompts, "before": old, "after": new, "reward": rewards}
    return write_samples(folder, columns, rewards=rewards, count=count)


def samples_of(runs: Mapping[str, Run]) -> dict[str, list[Any]]:
    """A table of the samples of one run for each label; empty without runs."""
    columns: dict[str, list[Any]] = {"run": []} if runs else {}
    for label, run in runs.items():
        samples = json.loads((run.folder / SAMPLES).read_text(encoding="utf-8"))
        columns["run"] += [label] * len(next(iter(samples.values())))
        for heading, cells in samples.items():
            columns.setdefault(heading, []).extend(cells)
    return columns
