"""The record of a batch of responses, and that of a minibatch's update."""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

UNKNOWN = torch.empty(0)


@dataclass(frozen=True)
class Rollout:
    """B responses. Columns are [B] per response and [B, W] per token, 0 where `mask` is 0; `evaluate` fills them."""

    queries: list[Tensor]
    responses: list[Tensor]
    response_masks: list[Tensor] | None  # for each response, 1 where a token counts; None: all count
    response_rewards: list[Tensor] | None  # what an environment gave at each token
    sampler_logprobs: list[Tensor] | None  # log-probabilities of the tokens as they were sampled, in nats
    model_inputs: dict[str, Tensor]
    scores: Tensor  # [B], as given, with the rewards of an environment
    mask: Tensor = UNKNOWN  # 1 where a token counts
    logprobs: Tensor = UNKNOWN  # of the policy before the updates, in nats
    sampled: Tensor | None = None  # `sampler_logprobs` in the columns of `mask`
    old_logprobs: Tensor = UNKNOWN  # of the ratio: `logprobs`, or `sampled`
    ref_logprobs: Tensor = UNKNOWN
    entropy: Tensor | None = None  # None if a forward pass of 2024 does not return logits
    values: Tensor = UNKNOWN
    kl: Tensor = UNKNOWN
    non_score_rewards: Tensor = UNKNOWN
    advantages: Tensor = UNKNOWN
    returns: Tensor = UNKNOWN

    @property
    def lengths(self) -> Tensor:
        """[B], tokens of query and response."""
        return torch.tensor([len(pair[0]) + len(pair[1]) for pair in zip(self.queries, self.responses, strict=True)])

    def __getitem__(self, rows: Tensor) -> "Rollout":
        def chosen(column: Any) -> Any:
            if isinstance(column, list):
                return [column[i] for i in rows.tolist()]
            if isinstance(column, dict):
                return {name: chosen(value) for name, value in column.items()}
            return column if column is None or column is UNKNOWN else column[rows.to(column.device)]

        return Rollout(**{field.name: chosen(getattr(self, field.name)) for field in fields(self)})

    def minibatches(self, rows: Tensor, size: int) -> list[Tensor]:
        """The rows in minibatches of like length."""
        return list(rows[self.lengths[rows].argsort(stable=True)].split(size))


class Minibatch(NamedTuple):
    """Raw statistics of a minibatch of an update."""

    mask: Tensor
    entropy: Tensor | None
    stats: dict[str, Any]  # of `train_minibatch`
    largest_log_ratio: Tensor
