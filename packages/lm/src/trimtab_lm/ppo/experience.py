"""The records of a batch of responses, of a minibatch's update, and of the step that is under way."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from trimtab_common.stats import Mean, Summary, packed, unpacked

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


class Evaluated(NamedTuple):
    """A batch before its first update, and what its updates have recorded so far.

    Attributes:
        rollout: with all columns, on the host.
        mismatch: how far the sampler differs from the policy.
        recorded: the minibatches of the updates that are done.
    """

    rollout: Experience
    mismatch: dict[str, Mean | Tensor]
    recorded: list[Minibatch]


class Unfinished:
    """The evaluated batch whose updates are under way, if there is one: a checkpoint holds it, to finish the step.

    Attributes:
        batch: None between steps.
        sampling: statistics of its responses that `train` logs with the step's.
    """

    def __init__(self) -> None:
        self.batch: Evaluated | None = None
        self.sampling: dict[str, Summary] = {}

    def take_sampling(self) -> dict[str, Summary]:
        """`sampling`, which is empty afterwards."""
        sampling, self.sampling = self.sampling, {}
        return sampling

    def state_dict(self) -> dict[str, Any]:
        """For torch.save; empty between steps."""
        if self.batch is None:
            return {}
        rollout, mismatch, recorded = self.batch
        rows = [minibatch._asdict() for minibatch in recorded]
        stats = {"mismatch": packed(mismatch), "sampling": packed(self.sampling), "recorded": packed(rows)}
        return {"rollout": dict(vars(rollout)), **stats}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state_dict` returned."""
        recorded = [Minibatch(**row) for row in unpacked(state["recorded"])]
        self.batch = Evaluated(Experience(**state["rollout"]), unpacked(state["mismatch"]), recorded)
        self.sampling = unpacked(state.get("sampling", {}))  # of an earlier version: without


def placed(rollout: Experience, device: torch.device, *, tokens: torch.device) -> Experience:
    """A rollout of the host with its columns on the device of the models, and its token ids and masks on `tokens`."""
    of_tokens = ("queries", "responses", "response_masks", "model_inputs")
    columns = {
        name: send_to_device(column, tokens if name in of_tokens else device) for name, column in vars(rollout).items()
    }
    return replace(rollout, **{**columns, "lengths": rollout.lengths})
