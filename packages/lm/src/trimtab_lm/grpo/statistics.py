"""Statistics of rollouts and updates: numbers for the logs, rows for the table, warnings."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Trainer

from trimtab_common.conditions import Vitals
from trimtab_common.formulas.surrogate import surrogate_stats
from trimtab_common.stats import Correlation, Mean, Surprise
from trimtab_common.tracking import MAX_TABLE_ROWS
from trimtab_lm.hf.tracking import Tables
from trimtab_lm.rewards.functions import Scored, reward_stats
from trimtab_lm.sampling.mismatch import mismatch_stats, with_largest
from trimtab_lm.sampling.rollout import Rollout
from trimtab_lm.tokens.scores import TokenScores

from .algorithm import Completions, Losses
from .config import GRPOConfig
from .loss import BY_TOKENS, OF_THE_BATCH, Totals

LENGTHS, SURPRISE = "completions/lengths", "sampling/surprise"
LENGTH_CORRELATION = "completions/length_reward_correlation"


class ScoredRollout(NamedTuple):
    """A rollout with its texts and scores, for statistics: P prompts, S completions, G side by side.

    Attributes:
        rollout: what is learnt from.
        sampled: what the backend returned.
        prompts: P texts.
        texts: S completions as texts.
        written: [S], float32, tokens that the policy wrote.
        ended: [S], whether a completion ended by itself.
        scored: the rewards of the S completions.
        num_tokens: sampled and read.
    """

    rollout: Completions
    sampled: Rollout
    prompts: list[str]
    texts: list[str]
    written: Tensor
    ended: Tensor
    scored: Scored
    num_tokens: int


def rollout_stats(sampled: ScoredRollout, *, names: Sequence[str], bos: int | None) -> dict[str, Any]:
    """Statistics of the rewards (see `reward_stats`) and lengths, in tokens, of a rollout.

    `completions/clipped_ratio` is the share that was cut at the length limit. Lengths count what the policy wrote.
    `completions/length_reward_correlation` correlates lengths and rewards within groups, if both vary.
    """
    lengths, ended, scored, episodes = sampled.written, sampled.ended, sampled.scored, sampled.sampled.episodes
    if not len(lengths):
        return {}
    size, groups = len(lengths) // len(sampled.prompts), sampled.rollout.groups[: len(sampled.prompts)]
    doubled = [bos is not None and list(group.prefix[:2]) == [bos, bos] for group in groups]
    by_group = torch.stack([lengths, scored.rewards]).double().view(2, -1, size)
    within = (by_group - by_group.mean(2, keepdim=True)).flatten(1)
    return reward_stats(names, scored, num_generations=size) | {
        LENGTH_CORRELATION: Correlation.of(*within),
        **({} if episodes is None else episodes.stats(len(lengths))),
        "completions/mean_length": Mean.of(lengths),
        "completions/mean_terminated_length": Mean.of(lengths, ended),
        "completions/clipped_ratio": Mean.of(1 - ended.float()),
        "prompts/doubled_bos": Mean.of(torch.tensor(doubled, dtype=torch.float32)),
        LENGTHS: lengths,
    }


def update_stats(
    losses: Losses, scores: TokenScores, rollout: Completions, config: GRPOConfig, *, totals: Totals | None
) -> dict[str, Any]:
    """Statistics of a micro-batch; of one that is evaluated, for which `totals` are given, the loss among them."""
    kl, sampler, lengths = losses.kl, rollout.sampler_logprobs, rollout.lengths
    stats: dict[str, Any] = policy_stats(losses.log_ratio, losses.advantages, **config.clip, kl=kl)
    if sampler is not None:
        cap = config.importance_sampling_cap
        stats |= mismatch_stats(losses.trainer_logprobs, sampler, lengths=lengths, cap=cap)
    stats["entropy"] = Mean.of(scores.entropy)
    if rollout.old_logprobs is None and config.samples_tell_surprise:
        stats[SURPRISE] = Surprise.of_tokens(scores.logprobs, scores.entropy)
    if totals is not None:
        weight = totals.tokens if config.loss_type in BY_TOKENS else totals.sequences
        stats["loss"] = Mean(losses.loss.detach() * weight, weight)
    return stats


@torch.no_grad()
def policy_stats(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    kl: Tensor | None = None,
) -> dict[str, Mean]:
    """Means over the tokens of an update; all [N], as for `clipped_surrogate`.

    `ratio`: mean of r. `approxkl`: mean of log(r)^2 / 2. `clip_ratio/low_mean` and `/high_mean`: share of tokens whose
    gradient is stopped below 1 - clip_low or above 1 + clip_high; `/region_mean`: either.
    `clip_ratio/dual_mean`: share stopped at `dual_clip`, if there is one. `kl`: mean of the penalty `kl`, [N], in nats
    per token, if there is one.
    """
    ones = torch.ones_like(log_ratio)
    stats = surrogate_stats(log_ratio, advantages, ones, clip_low=clip_low, clip_high=clip_high)
    ratio = log_ratio.exp()
    low, high = (advantages < 0) & (ratio < 1 - clip_low), (advantages > 0) & (ratio > 1 + clip_high)
    result = {
        "ratio": stats["ratio"],
        "approxkl": stats["approxkl"],
        "clip_ratio/low_mean": Mean.of(low.to(ratio.dtype)),
        "clip_ratio/high_mean": Mean.of(high.to(ratio.dtype)),
        "clip_ratio/region_mean": stats["clipfrac"],
    }
    if dual_clip is not None:
        result["clip_ratio/dual_mean"] = Mean.of(((advantages < 0) & (ratio > dual_clip)).to(ratio.dtype))
    return result if kl is None else result | {"kl": Mean.of(kl)}


def numbers_of(stats: Mapping[str, Any]) -> dict[str, float]:
    """Gathered statistics as numbers, the least and greatest length among them; means of nothing (NaN) are left out."""
    numbers = {name: value for name, value in with_largest(stats).items() if name != LENGTHS}
    if (lengths := stats.get(LENGTHS)) is not None:
        numbers |= {"completions/min_length": lengths.min(), "completions/max_length": lengths.max()}
    return {name: float(value) for name, value in numbers.items() if not math.isnan(value)}


def vitals(numbers: Mapping[str, float], config: GRPOConfig, *, pads_with_an_end: bool) -> Vitals:
    """The quantities for the health checks of the steps since the last log."""
    is_scaled = config.scale_rewards in ("group", *OF_THE_BATCH)
    ended = 1 - numbers.get("completions/clipped_ratio", 0.0)
    return Vitals(
        kl_per_token=numbers.get("kl"),
        entropy=numbers.get("entropy"),
        surprise=numbers.get(SURPRISE),
        clip_fraction=numbers.get("clip_ratio/region_mean"),
        reward_std=numbers.get("reward_std"),
        scale=None if is_scaled else numbers.get("reward_std"),
        response_length=numbers.get("completions/mean_length"),
        length_correlation=numbers.get(LENGTH_CORRELATION),
        ended=ended if pads_with_an_end else None,
        doubled_bos=numbers.get("prompts/doubled_bos"),
    )


class SampleTable:
    """The last completions between logs, separate for training and evaluation.

    Args:
        names: the names of the reward functions.
        printed: how many completions `show` prints; None prints all of them.
    """

    def __init__(self, names: Sequence[str], *, printed: int | None = 0):
        self.names, self.printed = list(names), printed
        self._rows: dict[bool, deque[list[object]]] = {flag: deque(maxlen=MAX_TABLE_ROWS) for flag in (True, False)}

    def add(self, sampled: ScoredRollout, *, training: bool) -> None:
        """Keep the completions of a rollout."""
        scored, size = sampled.scored, len(sampled.texts) // max(len(sampled.prompts), 1)
        advantages = sampled.rollout.advantages[: len(sampled.texts), None]
        numbers = torch.cat([scored.scores, scored.rewards[:, None], advantages], dim=1).tolist()
        for place, text in enumerate(sampled.texts):
            self._rows[training].append([sampled.prompts[place // size], text, *numbers[place]])

    def drop(self, *, training: bool) -> None:
        """Forget the completions since the last table."""
        self._rows[training].clear()

    def show(self, trainer: Trainer, tables: Tables, name: str, *, training: bool) -> None:
        """Put the completions that were kept since the last call into a table, and print some."""
        rows = list(self._rows[training])
        self.drop(training=training)
        tables.add(trainer, name, ["prompt", "completion", *self.names, "reward", "advantage"], rows)
        if not trainer.is_world_process_zero():
            return
        for prompt, completion, *numbers in rows if self.printed is None else rows[: self.printed]:
            named = zip([*self.names, "reward", "advantage"], numbers, strict=True)
            line = ", ".join(f"{name} {value:.4g}" for name, value in named)
            print(f"step {trainer.state.global_step}: {prompt!r} -> {completion!r} ({line})")
