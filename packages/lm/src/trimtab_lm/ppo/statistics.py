"""The documented statistics of a PPO step. Every mean, variance and distribution is of the positions that count."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trimtab_common.conditions import Vitals
from trimtab_common.config import flattened
from trimtab_common.formulas.kl import k3
from trimtab_common.formulas.masking import explained_variance
from trimtab_common.health import check_rows
from trimtab_common.stats import Correlation, Deviation, Mean, Summary, Variance, gather_stats, merge_stats
from trimtab_lm.rewards.functions import Scored, function_stats
from trimtab_lm.sampling.generate import pad
from trimtab_lm.sampling.mismatch import Surprise, corrected, with_largest
from trimtab_lm.sampling.rollout import Rollout as Sampled

from .checks import check_fits
from .config import PPOConfig
from .policy import Compared
from .samples import Samples, carry, check_same_tokens

LENGTH_CORRELATION = "tokens/responses_len_score_correlation"


def as_sampled(sampler_logprobs: Sequence[Tensor] | None, samples: Samples, old: Compared) -> Tensor | None:
    """Log-probabilities of the tokens as they were sampled, [B, R], 0 where a token does not count.

    Args:
        sampler_logprobs: for each response its tokens', in nats; None if nobody knows them.
        samples: the responses.
        old: their log-probabilities under the policy, for dtype and places.

    Raises:
        ValueError: the numbers do not fit the responses.
    """
    if sampler_logprobs is None:
        return None
    check_fits(sampler_logprobs, samples.responses)
    return carry(pad([row.to(old.logprobs) for row in sampler_logprobs], 0)[0], samples.mask, old.mask)


@dataclass(frozen=True)
class Rollout:
    """A scored batch, before the first update. [B] per response; [B, R] per token, 0 where `mask` is 0."""

    samples: Samples
    mask: Tensor  # [B, R], 1 where a token counts
    scores: Tensor  # [B], as given
    logprobs: Tensor  # [B, R] and so on, in nats
    old_logprobs: Tensor  # of the ratio: the same, or those of the policy that sampled
    ref_logprobs: Tensor
    entropy: Tensor | None  # None if nobody knows it
    values: Tensor
    kl: Tensor
    non_score_rewards: Tensor
    advantages: Tensor
    returns: Tensor
    mismatch: Mapping[str, Mean | Tensor]  # of sampler and trainer, statistics

    @classmethod
    def of(cls, samples: Samples, scores: Tensor, old: Compared, **columns: Tensor) -> "Rollout":
        """The samples as policy and reference see them, with further columns [B, R], set to 0 outside the mask.

        Raises:
            TrainingDivergedError: a row is not finite; the text names it.
        """
        at_tokens = {name: torch.where(old.mask.bool(), column, 0.0) for name, column in columns.items()}
        check_rows({"logprobs": old.logprobs, "ref_logprobs": old.ref_logprobs, **at_tokens}, what="response")
        at_tokens |= {"logprobs": old.logprobs, "old_logprobs": old.logprobs, "ref_logprobs": old.ref_logprobs}
        return cls(samples=samples, mask=old.mask, scores=scores, entropy=old.entropy, mismatch={}, **at_tokens)

    def corrected(self, sampled: Tensor | None, *, cap: float | None, clips_to_sampler: bool) -> "Rollout":
        """The rollout with advantages for the sampler's probabilities, and their mismatch; see `mismatch.corrected`.

        Args:
            sampled: [B, R], of `as_sampled`.
            cap: the largest weight of an advantage; None: no correction.
            clips_to_sampler: the ratio is to the sampler's probabilities.

        Raises:
            ValueError: there is something to correct and nothing to correct by.
        """
        mask, old_logprobs = self.mask.bool(), self.old_logprobs
        told = None if sampled is None else sampled[mask]
        advantages, mismatch = corrected(
            self.advantages[mask], self.logprobs[mask], told, lengths=self.mask.sum(1), cap=cap
        )
        if clips_to_sampler:
            if sampled is None:
                raise ValueError(
                    "asynchronous_rollouts=True takes the ratio to the policy that sampled: give step "
                    "sampler_logprobs, or set asynchronous_rollouts=False."
                )
            old_logprobs = sampled
        advantages = self.advantages.masked_scatter(mask, advantages)
        return replace(self, advantages=advantages, old_logprobs=old_logprobs, mismatch=mismatch)

    @cached_property
    def counts(self) -> Tensor:
        """[B], the tokens of each response that count, on the CPU."""
        return self.mask.sum(1).cpu()

    def rows(self, index: Tensor, mask: Tensor, *, is_same_layout: bool) -> dict[str, Tensor]:
        """What a minibatch learns from, [b, W]: columns of the chosen rows, in the places of the same tokens in `mask`.

        Args:
            index: [b], numbers of the rows.
            mask: [b, W], 1 where a token counts.
            is_same_layout: tokens are in the columns of the rollout's mask, as those of the built-in forward pass are.

        Raises:
            ValueError: `mask` [b, W] counts other tokens than the rollout's mask does.
        """
        columns = {"old_logprobs": self.old_logprobs, "values": self.values}
        columns |= {"advantages": self.advantages, "returns": self.returns}
        index = index.to(self.mask.device)
        chosen = {name: column[index] for name, column in columns.items()}
        if is_same_layout:
            return {name: column[:, : mask.shape[1]] for name, column in chosen.items()}
        old_mask = self.mask[index]
        check_same_tokens(mask, old_mask)
        return {name: carry(column, old_mask, mask) for name, column in chosen.items()}

    def step_data(self) -> dict[str, Any]:
        """The columns under the names that `PPOTrainer.record_step_stats` takes."""
        return {
            "queries": self.samples.queries,
            "responses": self.samples.responses,
            "scores": self.scores,
            "masks": self.mask,
            "logprobs": self.logprobs,
            "ref_logprobs": self.ref_logprobs,
            "kls": self.kl,
            "non_score_reward": self.non_score_rewards,
            "values": self.values,
            "advantages": self.advantages,
            "returns": self.returns,
            "entropy": self.entropy,
        }


def training_stats(rollout: Rollout, recorded: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Statistics of the updates, and of what they learnt from, as `record_step_stats` takes them. Collective.

    Each is a tensor whose mean over its first axis is the statistic. Means and variances cover the tokens of all
    processes; `policy/advantages` [1, N] are those of this process.
    """
    mask = rollout.mask
    numbers = gather_stats(
        {
            **merge_stats(recorded),
            "policy/advantages_mean": Mean.of(rollout.advantages, mask),
            "returns/mean": Mean.of(rollout.returns, mask),
            "returns/var": Variance.of(rollout.returns, mask),
            "val/mean": Mean.of(rollout.values, mask),
            "val/var": Variance.of(rollout.values, mask),
            **rollout.mismatch,
        }
    )
    numbers = with_largest(numbers)
    stats = {name: torch.tensor([value], dtype=torch.float64) for name, value in numbers.items()}
    return {**stats, "policy/advantages": rollout.advantages[mask.bool()][None]}


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
    advantages: Tensor,
    returns: Tensor,
    entropy: Tensor | None,
) -> dict[str, Any]:
    """Statistics of this process's part of the batch, to be gathered; `objective/kl` is the KL of the penalty."""
    mask = masks.bool()
    kl_per_response = kls.sum(1)
    stats: dict[str, Any] = {
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
        lengths = torch.tensor([float(len(row)) for row in rows])
        stats[f"tokens/{name}_len_mean"] = Mean.of(lengths)
        stats[f"tokens/{name}_len_std"] = Deviation.of(lengths)
        stats[f"tokens/{name}_dist"] = lengths
    return stats


def vitals(stats: Mapping[str, float], config: PPOConfig) -> Vitals:
    """The quantities of a step that its health is judged by; a subclass's statistics may lack some."""
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


def token_stats(
    samples: Samples, scores: Tensor, tokenizer: PreTrainedTokenizerBase, *, ends: Sequence[int]
) -> dict[str, Summary]:
    """The share of queries that begin with two BOS tokens, `tokens/doubled_bos`, and `tokens/ended`.

    `tokens/responses_len_score_correlation` is that of lengths and scores, NaN where one of them does not vary.

    `tokens/ended` is the share of responses that end with an end token, where padding is one: a model that was
    fine-tuned with such padding may not have learnt to stop.

    Args:
        samples: of a step.
        scores: [B], of the responses.
        tokenizer: of the policy.
        ends: the tokens that end a response.
    """
    stats: dict[str, Summary] = {}
    if tokenizer.bos_token_id is not None:
        first = [query[:2] for query in samples.queries if len(query) > 1]
        twice = (torch.stack(first) == tokenizer.bos_token_id).all(1) if first else torch.zeros(1)
        stats["tokens/doubled_bos"] = Mean(twice.sum(), len(samples.queries))
    if tokenizer.pad_token_id in ends:
        stats["tokens/ended"] = Mean.of(ended(samples.responses, ends).float())
    lengths = torch.tensor([len(response) for response in samples.responses])
    stats[LENGTH_CORRELATION] = Correlation.of(lengths, scores)
    return stats


def ended(responses: Sequence[Tensor], ends: Sequence[int]) -> Tensor:
    """[B], whether the last token of each response [R] is one of `ends`."""
    last = torch.stack([response[-1] for response in responses])
    return torch.isin(last, last.new_tensor(ends))


def named(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Nested statistics under joined names, `policy/ratio`; NumPy's arrays become tensors."""
    return {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in flattened(stats).items()}


def token_means(stats: Mapping[str, Any], mask: Tensor) -> dict[str, Any]:
    """Statistics of a minibatch with mask [b, R], each weighed by its tokens, so that minibatches add up.

    A tensor of the mask's shape becomes its mean over the tokens that count; a number, and the mean of any other
    tensor, weigh as much as the minibatch has tokens.
    """
    weighed: dict[str, Any] = {}
    for name, value in named(stats).items():
        if isinstance(value, Summary):
            weighed[name] = value
        elif isinstance(value, Tensor) and value.shape == mask.shape:
            weighed[name] = Mean.of(value, mask)
        else:
            number = float(torch.as_tensor(value, dtype=torch.float64).mean())
            weighed[name] = Mean(number * float(mask.sum()), float(mask.sum()))
    return weighed


def sampling_stats(sampled: Sampled, names: Sequence[str], scored: Scored, *, step: int) -> dict[str, Summary]:
    """What a step of `train` logs of its responses, for `gather_stats`: most runs have nothing.

    Args:
        sampled: the responses.
        names: of the reward functions; with several, each has its mean and deviation.
        scored: the scores of the responses.
        step: PPO steps of the policy before this one.
    """
    stats: dict[str, Summary] = {} if sampled.episodes is None else {**sampled.episodes.stats()}
    if sampled.policy_step is not None:
        stats["ppo/sampling/steps_behind"] = Mean(float(step - sampled.policy_step), 1.0)
    return stats | function_stats(names, scored) if len(names) > 1 else stats


def one_dimensional(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Statistics that `gather_stats` can merge: tensors of more axes are flattened."""
    return {
        name: value.flatten() if isinstance(value, Tensor) and value.dim() > 1 else value
        for name, value in named(stats).items()
    }


def as_numbers(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Statistics with means, variances and tensors without axes as floats."""
    numbers = {name: value.value if isinstance(value, Summary) else value for name, value in stats.items()}
    return {
        name: float(value) if isinstance(value, Tensor) and value.dim() == 0 else value
        for name, value in numbers.items()
    }


class Clock:
    """Seconds of the phases of a step, one after the other."""

    def __init__(self) -> None:
        self.started = self.last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """The time since the last lap, or the start, was `name`'s."""
        now = time.perf_counter()
        self.laps[name] = now - self.last
        self.last = now

    def stats(self) -> dict[str, float]:
        return {
            f"time/ppo/{name}": lap for name, lap in {**self.laps, "total": time.perf_counter() - self.started}.items()
        }
