"""What a rollout and an update tell: numbers for the logs, rows for the table, warnings of what goes wrong."""

import math
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

from trimtab_common.health import HealthMonitor, Vitals
from trimtab_common.stats import Mean
from trimtab_common.tracking import MAX_TABLE_ROWS
from trimtab_lm.hf.support import Recorder, Tables
from trimtab_lm.rewards.functions import Scored, reward_stats
from trimtab_lm.sampling.rollout import Rollout, sampler_mismatch

from .batches import Group

LENGTHS = "completions/lengths"


def rollout_stats(groups: Sequence[Group], rollout: Rollout, scored: Scored, *, names: Sequence[str]) -> dict[str, Any]:
    """Statistics of the rewards (see `reward_stats`) and lengths, in tokens, of these groups, a rollout's first ones.

    `completions/clipped_ratio` is the share that was cut at the length limit. names: of the reward functions.
    """
    lengths = torch.tensor([len(ids) for group in groups for ids in group.completions], dtype=torch.float32)
    if not len(lengths):
        return {}
    size, ended = len(groups[0].completions), torch.tensor(rollout.ended[: len(lengths)])
    scored = Scored(*(column[: len(lengths)] for column in scored))
    return reward_stats(names, scored, num_generations=size) | {
        "completions/mean_length": Mean.of(lengths),
        "completions/mean_terminated_length": Mean.of(lengths, ended),
        "completions/clipped_ratio": Mean.of(1 - ended.float()),
        LENGTHS: lengths,
    }


def mismatch_stats(logprobs: Tensor, sampler_logprobs: Tensor, *, lengths: Tensor) -> dict[str, Any]:
    """How far the sampler's probabilities are from the trainer's: see `sampler_mismatch`, whose arguments these are."""
    found = sampler_mismatch(logprobs, sampler_logprobs, lengths=lengths)
    return {
        "sampling/logp_difference/mean": Mean.of(found.difference),
        "sampling/importance_ratio/mean": Mean.of(found.sequence_ratio, lengths > 0),
    }


class Journal:
    """Statistics, sampled completions and alerts between logs, apart for training and evaluation.

    names: of the reward functions. printed: completions that `show` prints; None prints all that it has.
    """

    def __init__(self, names: Sequence[str], *, printed: int | None = 0):
        self.names, self.printed = list(names), printed
        self.recorder, self.tables, self.health = Recorder(), Tables(), HealthMonitor()
        self._rows: dict[bool, deque[list[Any]]] = {flag: deque(maxlen=MAX_TABLE_ROWS) for flag in (True, False)}

    def add_rollout(
        self,
        groups: Sequence[Group],
        rollout: Rollout,
        scored: Scored,
        *,
        prompts: Sequence[str],
        completions: Sequence[str],
        training: bool,
    ) -> None:
        """groups: P, whose completions are the first of the rollout, and of `completions`; prompts: P texts."""
        self.recorder.add(rollout_stats(groups, rollout, scored, names=self.names), training=training)
        numbers = torch.cat([scored.scores, scored.rewards[:, None]], dim=1).tolist()
        advantages = [value for group in groups for value in group.advantages.tolist()]
        for i, advantage in enumerate(advantages):
            prompt = prompts[i * len(prompts) // len(advantages)]
            self._rows[training].append([prompt, completions[i], *numbers[i], advantage])

    def numbers(self, *, training: bool, prefix: str = "") -> dict[str, float]:
        """The statistics since the last time, of all processes; those of nothing (NaN) are left out. Collective."""
        numbers = self.recorder.flush(training=training, prefix=prefix)
        lengths: Any = numbers.pop(prefix + LENGTHS, None)
        if lengths is not None:
            numbers[f"{prefix}completions/min_length"] = float(lengths.min())
            numbers[f"{prefix}completions/max_length"] = float(lengths.max())
        return {name: float(value) for name, value in numbers.items() if not math.isnan(value)}

    def warn(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Warn of constant rewards, collapsing entropy, much clipping, growing completions; what to log of it."""
        vitals = Vitals(
            entropy=numbers.get("entropy"),
            clip_fraction=numbers.get("clip_ratio/region_mean"),
            reward_std=numbers.get("reward_std"),
            response_length=numbers.get("completions/mean_length"),
        )
        alerts = self.health.check(vitals)
        for alert in alerts:
            warnings.warn(str(alert), stacklevel=4)
        return self.health.metrics(alerts)

    def show(self, trainer: Trainer, name: str, *, training: bool) -> None:
        """The last completions since the last time, as rows of a table and on the screen."""
        rows, self._rows[training] = list(self._rows[training]), deque(maxlen=MAX_TABLE_ROWS)
        self.tables.add(trainer, name, ["prompt", "completion", *self.names, "reward", "advantage"], rows)
        if not trainer.is_world_process_zero():
            return
        for prompt, completion, *numbers in rows if self.printed is None else rows[: self.printed]:
            named = zip([*self.names, "reward", "advantage"], numbers, strict=True)
            line = ", ".join(f"{name} {value:.4g}" for name, value in named)
            print(f"step {trainer.state.global_step}: {prompt!r} -> {completion!r} ({line})")
