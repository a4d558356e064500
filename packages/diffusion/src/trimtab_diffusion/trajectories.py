"""The recorded trajectories of a diffusers pipeline, and their replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn.functional import pad

from trimtab_common.accelerators import moved
from trimtab_diffusion.compat.trees import tree_leaves, tree_map
from trimtab_diffusion.steps import Steps, along

Arguments: TypeAlias = dict[str, Any]
"""Keyword arguments of a denoiser: tensors, numbers, and nested dicts, lists and tuples of them."""

TEXT = "encoder_hidden_states"
MASKS = ("encoder_hidden_states_mask", "encoder_attention_mask")
"""The arguments by which denoisers take the prompt's tokens, and a mask, 1 where a token counts."""


@dataclass(frozen=True)
class Fixed:
    """An argument of a denoiser that is the same for all images and at all steps."""

    value: object

    def is_same(self, other: object) -> bool:
        """Whether another argument is fixed at an equal value."""
        if not isinstance(other, Fixed) or type(other.value) is not type(self.value):
            return False
        if isinstance(self.value, Tensor):
            return torch.equal(self.value, cast(Tensor, other.value))
        return bool(self.value == other.value)


def joined(parts: Sequence[Arguments], *, dim: int) -> Arguments:
    """Joins the arguments of several calls of a denoiser: the conditions of trajectories.

    Args:
        parts: conditions, whose tensors agree in their second dimension.
        dim: 0 joins images; 2 joins what a denoiser gets without the prompt and what it gets with it.

    Raises:
        ValueError: the arguments differ, or one changes between steps in some of the calls alone.
    """
    if len(parts) == 1:
        return parts[0]

    def cat(*leaves: Tensor | Fixed) -> Tensor | Fixed:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if isinstance(first := leaves[0], Fixed) and all(map(first.is_same, leaves)):
            return first
        if len(tensors) < len(leaves):
            raise ValueError("An argument that is the same for all images differs between calls.")
        if len({tensor.shape[1] for tensor in tensors}) > 1:
            raise ValueError("An argument changes between the steps of some calls alone.")
        return torch.cat(tensors, dim)

    try:
        return tree_map(cat, *of_one_length(parts))
    except ValueError as error:
        raise ValueError(
            f"The pipeline calls its denoiser with different arguments, which do not go into one batch: {error}"
        ) from error


def of_one_length(parts: Sequence[Arguments]) -> Sequence[Arguments]:
    """Pads texts in conditions with zeros, and masks them, if lengths or masks differ.

    Raises:
        ValueError: texts differ in length and the denoiser takes no mask.
    """
    mask = next((name for name in MASKS if name in parts[0]), "")
    texts, masks = ([part[name] for part in parts if isinstance(part.get(name), Tensor)] for name in (TEXT, mask))
    lengths = {text.shape[3] for text in texts}
    if len(lengths) < 2 and len(masks) in (0, len(parts)):
        return parts
    if not mask:
        raise ValueError(
            f"Prompts have {sorted(lengths)} tokens, and the denoiser takes no mask. Use a pipeline that pads all "
            "prompts to one length."
        )
    padded = []
    for part, text in zip(parts, texts, strict=True):
        has_mask, gap = isinstance(part[mask], Tensor), max(lengths) - text.shape[3]
        seen = part[mask] if has_mask else torch.ones(text.shape[:4], dtype=torch.bool, device=text.device)
        padded.append(part | {TEXT: pad(text, (0, 0, 0, gap)), mask: pad(seen, (0, gap))})
    return padded


def guided(output: Tensor, scale: float | None, *, keeps_norm: bool = False) -> Tensor:
    """Combines outputs without and with the prompt (Ho & Salimans 2022, arXiv:2207.12598, Eq. 6).

    Args:
        output: [2n, ...], without the prompt and then with it; [n, ...] where there is no scale.
        scale: the paper's w + 1; None: no guidance.
        keeps_norm: whether each token gets the norm that it has with the prompt (Qwen-Image).

    Returns:
        [n, ...].
    """
    if scale is None:
        return output
    without, with_prompt = output.chunk(2)
    combined = without + scale * (with_prompt - without)
    if not keeps_norm:
        return combined
    return combined * (with_prompt.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))


@dataclass(frozen=True)
class Schedule:
    """The steps of a pipeline, and the calls of its denoiser.

    Args:
        steps: the schedule.
        times: [T], the denoiser's argument `timestep`.
        name: the argument that takes the latents.
        guidance, keeps_norm: see `guided`.
        dtype: the dtype in which the denoiser reads the latents; None: as they are.
    """

    steps: Steps
    times: Tensor
    name: str
    guidance: float | None = None
    keeps_norm: bool = False
    dtype: torch.dtype | None = None

    def ask(self, denoiser: nn.Module, latents: Tensor, index: Tensor, conditions: Mapping[str, object]) -> Tensor:
        """Returns the output of one call of a denoiser, with the pipeline's guidance.

        Args:
            denoiser: the module.
            latents: [n, ...].
            index: [n], int64, on the CPU: which step of the schedule each is before.
            conditions: the denoiser's other arguments, for n rows, with guidance for 2n.

        Returns:
            [n, ...].
        """
        copies, read = 1 if self.guidance is None else 2, latents if self.dtype is None else latents.to(self.dtype)
        times = self.times[index].to(latents.device).repeat(copies)
        inputs = {self.name: torch.cat([read] * copies), "timestep": times}
        output = denoiser(**inputs, **conditions, return_dict=False)[0]
        return guided(output, self.guidance, keeps_norm=self.keeps_norm)

    def gaussian(
        self, denoiser: nn.Module, latents: Tensor, index: Tensor, conditions: Mapping[str, object]
    ) -> tuple[Tensor, Tensor]:
        """Mean [n, ...] and deviation [n] of the latents after each step, under a denoiser; arguments as of `ask`."""
        return self.steps.gaussian(self.ask(denoiser, latents, index, conditions), latents, index)


@dataclass(frozen=True)
class Trajectories:
    """The T steps of B images.

    Args:
        schedule: how the pipeline took them.
        first: [B, ...], the noise from which the pipeline starts.
        latents: [B, T, ...], after each step.
        logprobs: [B, T], per dimension, in nats; 0 for steps without noise.
        conditions: the denoiser's arguments other than latents and time. A tensor with a row per image is
            [B, T, k, ...], or [B, 1, k, ...] if it is the same at all steps; with guidance k is 2 (without and with the
            prompt), else 1. What else there is is `Fixed`.
        condition_rows: [B], int64: each image's row of `conditions`, where images share one. None: image i has row i.
    """

    schedule: Schedule
    first: Tensor
    latents: Tensor
    logprobs: Tensor
    conditions: Arguments
    condition_rows: Tensor | None = None

    def __len__(self) -> int:
        return len(self.first)

    @property
    def dimensions(self) -> int:
        """The number of dimensions of an image's latents, which turns a mean over them into a sum."""
        return self.first[0].numel()

    @classmethod
    def joined(cls, parts: Sequence[Trajectories]) -> Trajectories:
        """Returns the images of several calls of one pipeline with the same settings as one batch.

        Raises:
            ValueError: images of a part share rows of conditions, or `joined` refuses their conditions.
        """
        if len(parts) == 1:
            return parts[0]
        if any(part.condition_rows is not None for part in parts):
            raise ValueError(
                "Trajectories with condition_rows came, whose images share conditions: they are not joined. Join the "
                "images before they share any."
            )
        return cls(
            parts[0].schedule,
            torch.cat([part.first for part in parts]),
            torch.cat([part.latents for part in parts]),
            torch.cat([part.logprobs for part in parts]),
            joined([part.conditions for part in parts], dim=0),
        )


@dataclass(frozen=True)
class Pairs:
    """n pairs of an image and one of its steps.

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
    path: Trajectories, device: torch.device, rows: Tensor, steps: Tensor, generator: object = None
) -> Pairs:
    """The steps `steps` [n] of the images `rows` [n], both int64 on the CPU, as they were recorded."""

    def argument(leaf: Tensor | Fixed) -> object:
        if isinstance(leaf, Fixed):
            return send_to_device(leaf.value, device)
        return leaf[own, t.clamp(max=leaf.shape[1] - 1)].transpose(0, 1).flatten(0, 1).to(device)

    i, t = moved([rows, steps], path.latents.device)  # where all that was recorded is
    own = i if path.condition_rows is None else path.condition_rows[i]
    first, later = path.first[i], path.latents[i, (t - 1).clamp(min=0)]
    return Pairs(
        torch.where(along(t == 0, first), first, later.to(first.dtype)).to(device),
        path.schedule.steps.timesteps[steps],
        path.latents[i, t].to(first.dtype).to(device),
        path.logprobs[i, t].to(device),
        tree_map(argument, path.conditions),
    )


def noised_pairs(
    path: Trajectories, device: torch.device, rows: Tensor, steps: Tensor, generator: torch.Generator
) -> Pairs:
    """The last latents of the images `rows` [n], noised as before the steps `steps` [n], and what to predict there.

    Raises:
        ValueError: the denoiser's conditions depend on the latents of each step.
    """
    if any(isinstance(leaf, Tensor) and leaf.shape[1] > 1 for leaf in tree_leaves(path.conditions)):
        raise ValueError(
            "This pipeline's conditions depend on the latents of each step, and a regression noises the last latents "
            "anew. Use DDPO with estimator='is'."
        )
    images = path.latents[rows, -1].to(path.first.dtype).to(device)
    noise = torch.randn(images.shape, generator=generator).to(device)
    noised, target = path.schedule.steps.noised(images.float(), noise, steps)
    pairs = sampled_pairs(path, device, rows, torch.zeros_like(steps))  # for their conditions, equal at all steps
    times = path.schedule.steps.timesteps[steps]
    return replace(pairs, latents=noised.to(images.dtype), timesteps=times, next_latents=target)
