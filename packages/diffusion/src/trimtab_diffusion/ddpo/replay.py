"""Denoising steps that were sampled, and how the denoiser is asked about them again."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trimtab_diffusion.pipelines import DDPOStableDiffusionPipeline
from trimtab_diffusion.recording import Call, Trajectories
from trimtab_diffusion.steps import Steps

from .config import DDPOConfig


@dataclass(frozen=True)
class Replay:
    """n denoising steps, of any samples and any places in the schedule.

    Args:
        latents: [n, ...], before the step.
        next_latents: [n, ...], after it.
        logprobs: [n], of the step when it was sampled, nats per dimension.
        index: [n], int64, on the CPU: which step of the schedule it is.
        times: [n], what the denoiser is told.
        conditions: the denoiser's other arguments by name, their tensors [n, ...], or with guidance [2n, ...], those
            without a prompt first.
        steps: the schedule.
        call: how the denoiser is asked.
    """

    latents: Tensor
    next_latents: Tensor
    logprobs: Tensor
    index: Tensor
    times: Tensor
    conditions: Mapping[str, Any]
    steps: Steps
    call: Call

    @classmethod
    def of(cls, trajectories: Trajectories, rows: Tensor, steps: Tensor, device: torch.device) -> Replay:
        """The steps `steps` [n] of the samples `rows` [n], both int64 on the CPU, as they were recorded."""
        return cls(
            trajectories.before(rows, steps, device),
            trajectories.after(rows, steps, device),
            trajectories.scored(rows, steps, device),
            steps,
            trajectories.times[steps],
            trajectories.conditions.select(rows, steps, device),
            trajectories.steps,
            trajectories.call,
        )

    @classmethod
    def by_scheduler(
        cls,
        pipeline: DDPOStableDiffusionPipeline,
        config: DDPOConfig,
        latents: Tensor,
        timesteps: Tensor,
        next_latents: Tensor,
        *,
        logprobs: Tensor,
        embeds: Tensor | Mapping[str, Any],
    ) -> Replay:
        """Steps that are known by their timesteps [n]; see `DDPOTrainer.calculate_loss` for the arguments.

        The schedule is the scheduler's, as the pipeline's last call set it; before its first call, one of the config's
        `sample_num_steps`. There is guidance where the prompts' embeddings have 2n rows.
        """
        scheduler = pipeline.scheduler
        if len(scheduler.timesteps) == scheduler.config.num_train_timesteps:  # all of them: no call has set it
            scheduler = copy.deepcopy(scheduler)
            scheduler.set_timesteps(config.sample_num_steps)
        steps = Steps.of(scheduler, config.sample_eta)
        conditions = embeds if isinstance(embeds, Mapping) else {"encoder_hidden_states": embeds}
        states = conditions.get("encoder_hidden_states")
        is_guided = states is not None and len(states) == 2 * len(latents)
        _, name, *_ = inspect.signature(type(pipeline.denoiser).forward).parameters
        index = steps.index_of(timesteps)
        call = Call(name, config.sample_guidance_scale if is_guided else None)
        return cls(latents, next_latents, logprobs, index, timesteps, conditions, steps, call)

    @property
    def timesteps(self) -> Tensor:
        """[n], by which the scheduler knows the steps."""
        return self.steps.timesteps[self.index]

    @property
    def dimensions(self) -> int:
        """Numbers in the latents of a sample: times this, a mean over dimensions is in nats of the joint."""
        return self.latents[0].numel()

    def predict(self, denoiser: nn.Module, latents: Tensor) -> Tensor:
        """The denoiser's output for `latents` [n, ...] at these steps, guided as the samples were; [n, ...]."""
        times = self.times.to(latents.device)
        return self.call.predict(denoiser, latents, times, self.conditions)

    def gaussian(self, denoiser: nn.Module) -> tuple[Tensor, Tensor]:
        """Mean [n, ...] and deviation [n] of the latents after each step, under a denoiser."""
        return self.steps.gaussian(self.predict(denoiser, self.latents), self.latents, self.index)


def draw_pairs(steps: Steps, rows: Tensor, *, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pairs each of n samples with steps to train on, which it draws without replacement.

    Args:
        steps: the schedule; steps without noise have no log-probability and are not drawn.
        rows: [n], the samples.
        count: steps of a sample; at most those that have noise are drawn.
        generator: on the CPU.

    Returns:
        Rows and steps, both [n * count], int64.

    Raises:
        ValueError: no step has noise.
    """
    random = steps.is_random.nonzero().flatten()
    count = min(count, len(random))
    if count == 0:
        raise ValueError("No step of this schedule has noise: there is nothing to train. Use another scheduler.")
    chosen = torch.stack([random[torch.randperm(len(random), generator=generator)[:count]] for _ in rows])
    return rows.repeat_interleave(count), chosen.flatten()
