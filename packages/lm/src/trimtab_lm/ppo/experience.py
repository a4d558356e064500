"""The records of a batch of responses and of a minibatch's update."""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

UNKNOWN = torch.empty(0)


@dataclass(frozen=True)
class Experience:
    """B responses. Columns are [B] per response and [B, W] per token, 0 where `masks` is 0; `evaluate` fills them.

    They have the names that `PPOTrainer.record_step_stats` takes.
    """

    queries: list[Tensor]
    responses: list[Tensor]
    response_masks: list[Tensor] | None  # for each response, 1 where a token counts; None: all count
    response_rewards: list[Tensor] | None  # what an environment gave at each token
    sampler_logprobs: list[Tensor] | None  # log-probabilities of the tokens as they were sampled, in nats
    model_inputs: dict[str, Tensor]
    lengths: Tensor  # [B], tokens of query and response, on the host
    scores: Tensor  # [B], as given, with the rewards of an environment
    masks: Tensor = UNKNOWN  # 1 where a token counts
    logprobs: Tensor = UNKNOWN  # of the policy before the updates, in nats
    old_logprobs: Tensor = UNKNOWN  # of the ratio: `logprobs`, or the sampler's
    ref_logprobs: Tensor = UNKNOWN
    entropy: Tensor | None = None  # None if a forward pass of 2024 does not return logits
    values: Tensor = UNKNOWN
    kls: Tensor = UNKNOWN
    non_score_reward: Tensor = UNKNOWN
    advantages: Tensor = UNKNOWN
    returns: Tensor = UNKNOWN

    def __getitem__(self, rows: Tensor) -> "Experience":
        chosen, on = dict(vars(self)), cache(rows.to)
        for name, column in chosen.items():
            if isinstance(column, list):
                chosen[name] = [column[i] for i in rows.tolist()]
            elif isinstance(column, dict):
                chosen[name] = {key: value[on(value.device)] for key, value in column.items()}
            elif column is not None and column is not UNKNOWN:
                chosen[name] = column[on(column.device)]
        return Experience(**chosen)

    def minibatches(self, rows: Tensor, size: int) -> tuple[Tensor, ...]:
        """The rows in minibatches of like length."""
        return rows[self.lengths[rows].argsort(stable=True)].split(size)


class Minibatch(NamedTuple):
    """Raw statistics of a minibatch of an update."""

    mask: Tensor
    stats: dict[str, Any]  # of `train_minibatch`, and the policy's entropy
    largest_log_ratio: Tensor
