"""The documented statistics of a PPO step. Every mean, variance and distribution is of the positions that count."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab_common.kl import k3
from trimtab_common.masking import explained_variance
from trimtab_common.stats import Deviation, Mean, Variance

from .policy import TokenBatch


@dataclass(frozen=True)
class Rollout:
    """A scored batch, before the first update. [B] per response; [B, R] per token, 0 outside `batch.mask`."""

    batch: TokenBatch
    query_lengths: Tensor  # [B]
    response_lengths: Tensor  # [B]
    scores: Tensor  # [B], as given
    logprobs: Tensor  # [B, R] and so on, in nats
    ref_logprobs: Tensor
    entropy: Tensor
    values: Tensor
    kl: Tensor
    non_score_rewards: Tensor
    advantages: Tensor
    returns: Tensor


@torch.no_grad()
def rollout_stats(rollout: Rollout, *, kl_coef: float) -> dict[str, Any]:
    """Statistics of this process's part of the batch, to be gathered; `objective/kl` is the KL of the penalty."""
    mask = rollout.batch.mask.bool()
    kl_per_response = rollout.kl.sum(1)
    stats: dict[str, Any] = {
        "objective/kl": Mean.of(kl_per_response),
        "objective/kl_dist": kl_per_response,
        "objective/kl_k3": Mean.of((k3(rollout.logprobs, rollout.ref_logprobs) * mask).sum(1)),
        "objective/logprobs": rollout.logprobs[mask],
        "objective/ref_logprobs": rollout.ref_logprobs[mask],
        "objective/kl_coef": kl_coef,
        "objective/entropy": Mean.of(rollout.entropy.sum(1)),
        "ppo/mean_non_score_reward": Mean.of(rollout.non_score_rewards, mask),
        "ppo/mean_scores": Mean.of(rollout.scores),
        "ppo/std_scores": Deviation.of(rollout.scores),
        "ppo/policy/advantages": rollout.advantages[mask],
        "ppo/policy/advantages_mean": Mean.of(rollout.advantages, mask),
        "ppo/returns/mean": Mean.of(rollout.returns, mask),
        "ppo/returns/var": Variance.of(rollout.returns, mask),
        "ppo/val/mean": Mean.of(rollout.values, mask),
        "ppo/val/var": Variance.of(rollout.values, mask),
        "ppo/val/var_explained": float(explained_variance(rollout.values, rollout.returns, mask)),
    }
    for name, lengths in (("queries", rollout.query_lengths), ("responses", rollout.response_lengths)):
        stats[f"tokens/{name}_len_mean"] = Mean.of(lengths.float())
        stats[f"tokens/{name}_len_std"] = Deviation.of(lengths.float())
        stats[f"tokens/{name}_dist"] = lengths.float()
    return stats


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
