"""Pairs of a sample and a step: what was recorded of them, and the schedule by which the denoiser is asked again."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trimtab_diffusion.pipelines import DDPOStableDiffusionPipeline
from trimtab_diffusion.steps import Steps
from trimtab_diffusion.trajectories import Arguments, Call, Schedule, Trajectories

from .config import DDPOConfig


@dataclass(frozen=True)
class Pairs:
    """n pairs of a sample and one of its steps.

    Args:
        latents: [n, ...], before the step.
        timesteps: [n], by which the scheduler knows the step.
        next_latents: [n, ...], after the step; for regression what the denoiser should predict.
        logprobs: [n], of the step when it was sampled, nats per dimension.
        conditions: the denoiser's other arguments by name, their tensors [n, ...], or with guidance [2n, ...], those
            without a prompt first.
    """

    latents: Tensor
    timesteps: Tensor
    next_latents: Tensor
    logprobs: Tensor
    conditions: Arguments


def sampled_pairs(
    trajectories: Trajectories, device: torch.device, rows: Tensor, steps: Tensor, generator: object = None
) -> Pairs:
    """The steps `steps` [n] of the samples `rows` [n], both int64 on the CPU, as they were recorded."""
    return Pairs(
        trajectories.before(rows, steps, device),
        trajectories.steps.timesteps[steps],
        trajectories.after(rows, steps, device),
        trajectories.scored(rows, steps, device),
        trajectories.conditions.select(rows, steps, device),
    )


def noised_pairs(
    trajectories: Trajectories, device: torch.device, rows: Tensor, steps: Tensor, generator: torch.Generator
) -> Pairs:
    """The last latents of the samples `rows` [n], noised as before the steps `steps` [n], and what to predict there.

    Raises:
        ValueError: the denoiser's conditions depend on the latents of each step.
    """
    if trajectories.conditions.stepwise:
        raise ValueError(
            "This pipeline's conditions depend on the latents of each step, which reward-weighted regression samples "
            "anew. Use estimator='is'."
        )
    pairs = sampled_pairs(trajectories, device, rows, steps)
    images = trajectories.after(rows, torch.full_like(rows, len(trajectories.steps) - 1), device)
    noise = torch.randn(images.shape, generator=generator).to(device)
    noised, target = trajectories.steps.noised(images.float(), noise, steps)
    return replace(pairs, latents=noised.to(images.dtype), next_latents=target)


def schedule_of(
    pipeline: DDPOStableDiffusionPipeline, config: DDPOConfig, embeds: Tensor | Mapping[str, Any], count: int
) -> tuple[Schedule, Mapping[str, Any]]:
    """The schedule of the pipeline's last call, or before its first one that of the config, and `embeds` by name.

    There is guidance where the prompts' embeddings have twice `count` rows.
    """
    conditions = embeds if isinstance(embeds, Mapping) else {"encoder_hidden_states": embeds}
    schedule = pipeline.schedule
    if schedule is None:
        scheduler = copy.deepcopy(pipeline.scheduler)
        scheduler.set_timesteps(config.sample_num_steps)
        _, name, *_ = inspect.signature(type(pipeline.denoiser).forward).parameters
        schedule = Schedule(
            steps=Steps.of(scheduler, config.sample_eta), times=scheduler.timesteps.cpu(), call=Call(name)
        )
    states, guidance = conditions.get("encoder_hidden_states"), schedule.call.guidance
    if states is not None:
        is_guided = len(states) == 2 * count
        guidance = (guidance or config.sample_guidance_scale) if is_guided else None
    return replace(schedule, call=replace(schedule.call, guidance=guidance)), conditions
