"""The documented statistics of a PPO step. Means, variances and distributions cover the positions that count."""

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trimtab_common.conditions import Vitals
from trimtab_common.config import flattened
from trimtab_common.formulas.kl import k3
from trimtab_common.formulas.masking import explained_variance
from trimtab_common.stats import (
    Correlation,
    Deviation,
    Mean,
    Stats,
    Summary,
    Surprise,
    Variance,
    gather_stats,
    merge_stats,
)
from trimtab_lm.rewards.functions import Scored, function_stats
from trimtab_lm.sampling.mismatch import with_largest
from trimtab_lm.sampling.rollout import Rollout as Sampled

from .config import PPOConfig
from .experience import Experience, Minibatch
from .passes import Trainer

LENGTH_CORRELATION = "tokens/responses_len_score_correlation"


def training_stats(
    rollout: Experience, recorded: Sequence[Minibatch], mismatch: Mapping[str, Mean | Tensor]
) -> dict[str, Tensor]:
    """Statistics of the updates and of their inputs, for `record_step_stats`. Collective.

    Each is a tensor whose mean over its first axis is the statistic. Means and variances cover the tokens of all
    processes; `policy/advantages` [1, N] are those of this process.
    """
    mask = rollout.masks
    local = {
        **merge_stats(map(token_means, recorded)),
        "policy/advantages_mean": Mean.of(rollout.advantages, mask),
        "returns/mean": Mean.of(rollout.returns, mask),
        "returns/var": Variance.of(rollout.returns, mask),
        "val/mean": Mean.of(rollout.values, mask),
        "val/var": Variance.of(rollout.values, mask),
        **mismatch,
    }
    numbers = gather_stats(local)
    if mismatch:
        numbers = with_largest(numbers)
    stats = {name: torch.tensor([value], dtype=torch.float64) for name, value in numbers.items()}
    return {**stats, "policy/advantages": rollout.advantages[mask.bool()][None]}


def token_means(minibatch: Minibatch) -> Stats:
    """Statistics of a minibatch with mask [b, R], each weighed by its tokens, so that minibatches add up.

    A tensor of the mask's shape is averaged over the unmasked tokens. A number, and the mean of any other tensor, gets
    the minibatch's number of unmasked tokens as its weight.
    """
    mask, weighed = minibatch.mask, Stats()
    for name, value in flattened(minibatch.stats).items():
        if isinstance(value, Summary):
            weighed[name] = value
        elif np.shape(value) == mask.shape:
            weighed[name] = Mean.of(torch.as_tensor(value), mask)
        else:
            number = float(torch.as_tensor(value, dtype=torch.float64).mean())
            weighed[name] = Mean(number * float(mask.sum()), float(mask.sum()))
    return weighed


@torch.no_grad()
def rollout_stats(
    *,
    kl_coef: float,
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    scores: Tensor,
    masks: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    kls: Tensor,
    non_score_reward: Tensor,
    values: Tensor,
    returns: Tensor,
    entropy: Tensor | None,
    train_stats: Mapping[str, Tensor],
    **_: object,
) -> Stats:
    """Statistics of this process's part of the batch, to be gathered; `objective/kl` is the KL of the penalty."""
    mask = masks.bool()
    kl_per_response = kls.sum(1)
    stats: Stats = {
        "objective/kl": Mean.of(kl_per_response),
        "objective/kl_dist": kl_per_response,
        "objective/kl_k3": Mean.of((k3(logprobs, ref_logprobs) * mask).sum(1)),
        "objective/logprobs": logprobs[mask],
        "objective/ref_logprobs": ref_logprobs[mask],
        "objective/kl_coef": kl_coef,
        "ppo/mean_non_score_reward": Mean.of(non_score_reward, mask),
        "ppo/mean_scores": Mean.of(scores),
        "ppo/std_scores": Deviation.of(scores),
        "ppo/val/var_explained": float(explained_variance(values, returns, mask)),
    }
    if entropy is not None:
        stats["objective/surprise"] = Surprise.of_tokens(logprobs, entropy, mask)
        stats["objective/entropy"] = Mean.of(entropy.sum(1))
    for name, rows in (("queries", queries), ("responses", responses)):
        lengths = torch.tensor(list(map(len, rows)), dtype=torch.float32)
        stats[f"tokens/{name}_len_mean"] = Mean.of(lengths)
        stats[f"tokens/{name}_len_std"] = Deviation.of(lengths)
        stats[f"tokens/{name}_dist"] = lengths
    return stats | {f"ppo/{name}": value.mean(0) for name, value in train_stats.items()}


def vitals(stats: Stats, config: PPOConfig) -> Vitals:
    """The quantities of a step for the health checks; a subclass's statistics may lack some."""
    kl, length = stats["objective/kl"], stats.get("tokens/responses_len_mean")
    mean, variance = stats.get("ppo/returns/mean"), stats.get("ppo/returns/var")
    explained, spread = stats.get("ppo/val/var_explained"), stats.get("ppo/val/var")
    has_updates = config.ppo_epochs * config.batch_size > config.mini_batch_size * config.gradient_accumulation_steps
    return Vitals(
        kl=kl,
        kl_per_token=None if length is None else kl / length,
        kl_coef=stats.get("objective/kl_coef"),
        entropy=stats.get("ppo/policy/entropy"),
        surprise=None if config.asynchronous_rollouts else stats.get("objective/surprise"),
        clip_fraction=stats.get("ppo/policy/clipfrac"),
        explained_variance=explained,
        value_error=None if explained is None or variance is None else (1 - explained) * variance,
        value_gain=_value_gain(stats) if has_updates else None,
        value_spread=(spread / variance) ** 0.5 if spread is not None and variance else None,
        reward_std=stats["ppo/std_scores"],
        scale=None if mean is None or variance is None else math.hypot(mean, variance**0.5),
        response_length=length,
        length_correlation=stats.get(LENGTH_CORRELATION),
        ended=stats.get("tokens/ended"),
        doubled_bos=stats.get("tokens/doubled_bos"),
    )


def _value_gain(stats: Mapping[str, float]) -> float | None:
    """See `Vitals.value_gain`. The squared error before the updates is variance plus squared bias."""
    names = ("val/var_explained", "returns/var", "val/mean", "returns/mean", "val/error")
    if any(f"ppo/{name}" not in stats for name in names):
        return None
    explained, variance, value, target, during = (stats[f"ppo/{name}"] for name in names)
    before = (1 - explained) * variance + (value - target) ** 2
    return 1 - during / before if before > 0 else None


def token_stats(rollout: Experience, tokenizer: PreTrainedTokenizerBase, *, ends: Sequence[int]) -> dict[str, Summary]:
    """The share of queries that begin with two BOS tokens, `tokens/doubled_bos`, and `tokens/ended`.

    `tokens/responses_len_score_correlation` correlates lengths and scores; NaN if either does not vary.

    `tokens/ended` is the share of responses that end with an end token, where padding is one: a model that was
    fine-tuned with such padding may not have learnt to stop.
    """
    stats: dict[str, Summary] = {}
    if tokenizer.bos_token_id is not None:
        first = [query[:2] for query in rollout.queries if len(query) > 1]
        twice = (torch.stack(first) == tokenizer.bos_token_id).all(1) if first else torch.zeros(1)
        stats["tokens/doubled_bos"] = Mean(twice.sum(), len(rollout.queries))
    if tokenizer.pad_token_id in ends:
        stats["tokens/ended"] = Mean.of(ended(rollout.responses, ends).float())
    lengths = torch.tensor(list(map(len, rollout.responses)))
    stats[LENGTH_CORRELATION] = Correlation.of(lengths, rollout.scores.cpu())
    return stats


def ended(responses: Sequence[Tensor], ends: Sequence[int]) -> Tensor:
    """[B], whether the last token of each response [R] is one of `ends`."""
    last = torch.stack([response[-1] for response in responses])
    return torch.isin(last, last.new_tensor(ends))


def sampling_stats(sampled: Sampled, names: Sequence[str], scored: Scored, *, step: int) -> dict[str, Summary]:
    """Statistics of responses that a step of `train` logs, for `gather_stats`; empty in most runs."""
    stats: dict[str, Summary] = {} if sampled.episodes is None else {**sampled.episodes.stats()}
    if sampled.policy_step is not None:
        stats["ppo/sampling/steps_behind"] = Mean(float(step - sampled.policy_step), 1.0)
    return stats | function_stats(names, scored) if len(names) > 1 else stats


def step_stats(
    trainer: Trainer,
    rollout: Experience,
    recorded: Sequence[Minibatch],
    mismatch: Mapping[str, Mean | Tensor],
    clock: "Clock",
    *,
    ends: Sequence[int],
) -> Stats:
    """The documented statistics of a step over all processes: floats and 1-D tensors. Collective.

    A correlation that is unknown, because lengths or scores do not vary, is left out. See `training_stats` for the
    arguments; `ends` are the tokens that end a response.
    """
    train_stats = training_stats(rollout, recorded, mismatch)
    clock.lap("optimize_step")
    stats = trainer.record_step_stats(kl_coef=trainer.kl_ctl.value, **vars(rollout), train_stats=train_stats)
    clock.lap("calc_stats")
    local = flattened({**stats, **token_stats(rollout, trainer.tokenizer, ends=ends), **clock.stats})
    local["ppo/learning_rate"] = float(trainer.optimizer.param_groups[0]["lr"])
    for name, value in local.items():
        if isinstance(value, Tensor | np.ndarray):
            local[name] = torch.as_tensor(value).flatten() if value.ndim > 1 else torch.as_tensor(value)
    numbers = trainer.gather_stats(local)
    for name, value in numbers.items():
        if isinstance(value, Summary):
            numbers[name] = value.value
        elif isinstance(value, Tensor) and value.dim() == 0:
            numbers[name] = float(value)
    if math.isnan(numbers.get(LENGTH_CORRELATION, 0.0)):
        del numbers[LENGTH_CORRELATION]
    return numbers


class Clock:
    """Measures the seconds of each phase of a step, and of the whole step."""

    def __init__(self) -> None:
        self.started = self.last = time.perf_counter()
        self.stats: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Adds the time since the last lap, or the start, to phase `name`."""
        now = time.perf_counter()
        self.stats |= {f"time/ppo/{name}": now - self.last, "time/ppo/total": now - self.started}
        self.last = now
