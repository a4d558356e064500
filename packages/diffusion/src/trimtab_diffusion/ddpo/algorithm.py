"""DDPO (Black et al. 2023, arXiv:2305.13301): what rewards are worth, and the updates that follow them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from trimtab_common.formulas.advantages import group_whitened
from trimtab_diffusion.trajectories import Pairs

from .config import DDPOConfig
from .loss import rwr_weights, sparse_weights

Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Mapping[str, object]], Sequence[Tensor]]


@dataclass(frozen=True)
class PolicyChange:
    """How far the policy moved n steps: the loss without its penalty, the log-ratio [n] and the KL [n], if any, in nats
    per dimension; without gradients."""

    surrogate: Tensor
    log_ratio: Tensor
    kl: Tensor | None


class Losses(tuple[Tensor, ...]):
    """The three that `DDPOTrainer.calculate_loss` is documented to return, and `change`, of which they are means."""

    change: PolicyChange

    def __new__(cls, loss: Tensor, approx_kl: Tensor, clipped: Tensor, *, change: PolicyChange) -> Losses:
        losses = super().__new__(cls, (loss, approx_kl, clipped))
        losses.change = change
        return losses


class Optimizer(Protocol):
    """Takes optimizer steps, each of several parts."""

    def parts(self, chunks: Sequence[Tensor]) -> Iterator[Tensor]:
        """The chunks that make a step."""

    def backward(self, loss: Tensor, share: float) -> None:
        """Adds the gradient of a part's loss, which is `share` of the step's."""

    def step(self) -> Tensor:
        """Changes the weights; returns the gradient's norm."""


@dataclass
class Updated:
    """What an epoch's updates computed: of each part its pairs and their losses, of each update its gradient's norm."""

    parts: list[tuple[int, Sequence[Tensor], PolicyChange | None]] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)


def advantages_of(rewards: Tensor, prompts: Tensor, config: DDPOConfig) -> Tensor:
    """How much better the samples of all processes are than their group (GRPO) or the epoch; for RWR their weights.

    Args:
        rewards: [B], float64.
        prompts: [B], int64, equal for equal prompts.
        config: its estimator and group size.
    """
    if config.estimator == "rwr":
        return rwr_weights(rewards, prompts, beta=config.rwr_beta)
    if config.estimator == "rwr_sparse":
        return sparse_weights(rewards, top=config.rwr_top)
    size = config.group_size if config.group_size > 1 else len(rewards)
    return group_whitened(rewards, torch.arange(len(rewards)) // size, correction=0)


def update(
    advantages: Tensor,
    random_steps: Tensor,
    pairs_of: Callable[[Tensor, Tensor, torch.Generator], Pairs],
    loss_of: Loss,
    optimizer: Optimizer,
    *,
    generators: Sequence[torch.Generator],
    config: DDPOConfig,
) -> Updated:
    """Passes over an epoch's samples: updates on shuffled (sample, step) pairs.

    Args:
        advantages: [B].
        random_steps: steps that have a log-probability, int64, of which a random share trains.
        pairs_of: the pairs of samples [n] and steps [n].
        loss_of: their loss, a mean; see `DDPOTrainer.calculate_loss`.
        optimizer: takes the updates.
        generators: one for each pass.
        config: sizes of updates and of their parts.

    Raises:
        ValueError: no step has noise.
    """
    count, updated = min(config.trained_steps, len(random_steps)), Updated()
    if count == 0:
        raise ValueError("No step of this schedule has noise: there is nothing to train. Use another scheduler.")
    for generator in generators:
        for samples in torch.randperm(len(advantages), generator=generator).split(config.samples_per_update):
            drawn = [random_steps[torch.randperm(len(random_steps), generator=generator)[:count]] for _ in samples]
            rows, steps = samples.repeat_interleave(count), torch.cat(drawn)
            for part in optimizer.parts(torch.randperm(len(rows), generator=generator).split(config.train_batch_size)):
                pairs = pairs_of(rows[part], steps[part], generator)
                gains = advantages[rows[part]].to(pairs.latents.device)
                losses = loss_of(
                    pairs.latents, pairs.timesteps, pairs.next_latents, pairs.logprobs, gains, pairs.conditions
                )
                optimizer.backward(losses[0], len(part) / len(rows))
                values = [torch.as_tensor(each).detach() for each in losses]
                updated.parts.append((len(part), values, losses.change if isinstance(losses, Losses) else None))
            updated.norms.append(optimizer.step())
    return updated
