"""The recorded trajectories of a diffusers pipeline, and their replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn.functional import pad

from trimtab_diffusion.steps import Steps, along

Path: TypeAlias = tuple[object, ...]
"""The keys and indices that lead to a leaf of nested dicts, lists and tuples."""

Arguments: TypeAlias = dict[str, Any]
"""Keyword arguments of a denoiser: tensors, numbers, and nested dicts, lists and tuples of them."""

TEXT: Path = ("encoder_hidden_states",)
MASKS: tuple[Path, ...] = (("encoder_hidden_states_mask",), ("encoder_attention_mask",))
"""Where denoisers take the prompt's tokens [rows, tokens, width], and a mask [rows, tokens], 1 where a token counts."""


@dataclass
class Conditions:
    """The denoiser's arguments other than latents and time. A tensor that is the same at all steps is stored once.

    With guidance k is 2 (without and with the prompt), else 1.

    Args:
        template: the pipeline's arguments; what is not a tensor with a row per image has its value here.
        rows: tensors with a row per image that are the same at all steps, [B, k, ...].
        stepwise: tensors with a row per image that change between steps, [B, T, k, ...].
    """

    template: Arguments
    rows: dict[Path, Tensor]
    stepwise: dict[Path, Tensor]

    def select(self, rows: Tensor, steps: Tensor, device: torch.device) -> Arguments:
        """Returns the arguments for n pairs of an image and a step.

        Args:
            rows, steps: [n], the images and the steps.
            device: where the returned tensors lie.

        Returns:
            Arguments whose tensors with a row per image are [k n, ...].
        """
        leaves = {path: _take(value, rows) for path, value in self.rows.items()}
        leaves |= {path: _take(value, rows, steps) for path, value in self.stepwise.items()}
        flat = {path: send_to_device(value.transpose(0, 1).flatten(0, 1), device) for path, value in leaves.items()}
        return send_to_device(replaced(self.template, flat), device)

    def tensors(self) -> list[Tensor]:
        """Returns all stored tensors with a row per image."""
        return [*self.rows.values(), *self.stepwise.values()]

    @classmethod
    def joined(cls, parts: Sequence[Conditions], dim: int) -> Conditions:
        """Returns several conditions as one.

        Args:
            parts: recordings of one pipeline with the same settings. Shorter texts are padded and masked.
            dim: 0 joins images; 1 joins what a denoiser gets without the prompt and what it gets with it.

        Raises:
            ValueError: texts differ in length and the denoiser takes no mask, or the arguments differ.
        """
        parts = _of_one_length(parts)
        if any(
            part.rows.keys() != parts[0].rows.keys() or part.stepwise.keys() != parts[0].stepwise.keys()
            for part in parts
        ):
            raise ValueError(
                "The pipeline calls its denoiser with different arguments, which DDPO cannot put in one batch."
            )
        rows = {path: torch.cat([part.rows[path] for part in parts], dim) for path in parts[0].rows}
        steps = parts[0].stepwise
        stepwise = {path: torch.cat([part.stepwise[path] for part in parts], 2 * dim) for path in steps}
        return cls(parts[0].template, rows, stepwise)


def _of_one_length(parts: Sequence[Conditions]) -> Sequence[Conditions]:
    """Pads the texts of conditions with zeros, and masks them, where the lengths or the masks differ."""
    lengths = {part.rows[TEXT].shape[2] for part in parts if TEXT in part.rows}
    mask = next((path for path in MASKS if path[0] in parts[0].template), None)
    if len(lengths) < 2 and len({mask in part.rows for part in parts}) < 2:
        return parts
    if mask is None:
        raise ValueError(
            f"Prompts have {sorted(lengths)} tokens, and the denoiser takes no mask. Use a pipeline that pads all "
            "prompts to one length."
        )
    padded = []
    for part in parts:
        text = part.rows[TEXT]
        seen = part.rows.get(mask, torch.ones(text.shape[:3], dtype=torch.bool, device=text.device))
        gap = max(lengths) - text.shape[2]
        rows = part.rows | {TEXT: pad(text, (0, 0, 0, gap)), mask: pad(seen, (0, gap))}
        padded.append(Conditions(part.template, rows, part.stepwise))
    return padded


@dataclass(frozen=True)
class Call:
    """How a pipeline asks its denoiser about a batch of latents.

    Args:
        name: the argument that takes the latents.
        guidance: scale of classifier-free guidance, which is the paper's w + 1; None: no guidance.
        keeps_norm: whether each token of the guided output gets the norm that it has with the prompt (Qwen-Image).
        dtype: the dtype in which the denoiser reads the latents; None: as they are.
    """

    name: str
    guidance: float | None = None
    keeps_norm: bool = False
    dtype: torch.dtype | None = None

    def predict(self, denoiser: nn.Module, latents: Tensor, times: Tensor, conditions: Mapping[str, object]) -> Tensor:
        """Returns the output of one call of a denoiser, with classifier-free guidance where there is a scale.

        Args:
            denoiser: the module.
            latents: [n, ...].
            times: [n], the timesteps.
            conditions: the denoiser's other arguments, for n rows, with guidance for 2n.

        Returns:
            [n, ...].
        """
        copies = 1 if self.guidance is None else 2
        inputs = {
            self.name: torch.cat([latents if self.dtype is None else latents.to(self.dtype)] * copies),
            "timestep": times.repeat(copies),
        }
        return self.guided(denoiser(**inputs, **conditions, return_dict=False)[0])

    def guided(self, output: Tensor) -> Tensor:
        """Combines outputs without and with the prompt (Ho & Salimans 2022, arXiv:2207.12598, Eq. 6).

        Args:
            output: [2n, ...], without the prompt and then with it; [n, ...] where there is no scale.

        Returns:
            [n, ...].
        """
        if self.guidance is None:
            return output
        without, with_prompt = output.chunk(2)
        combined = without + self.guidance * (with_prompt - without)
        if not self.keeps_norm:
            return combined
        return combined * (with_prompt.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a pipeline denoises.

    Args:
        steps: the schedule.
        times: [T], the denoiser's argument `timestep`.
        call: how the pipeline asks the denoiser.
    """

    steps: Steps
    times: Tensor
    call: Call

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
        return self.call.predict(denoiser, latents, self.times[index].to(latents.device), conditions)

    def gaussian(
        self, denoiser: nn.Module, latents: Tensor, index: Tensor, conditions: Mapping[str, object]
    ) -> tuple[Tensor, Tensor]:
        """Mean [n, ...] and deviation [n] of the latents after each step, under a denoiser; arguments as of `ask`."""
        return self.steps.gaussian(self.ask(denoiser, latents, index, conditions), latents, index)


@dataclass(frozen=True, kw_only=True)
class Trajectories(Schedule):
    """The T steps of B images.

    Args:
        steps, times, call: see `Schedule`.
        first: [B, ...], the noise from which the pipeline starts.
        latents: [B, T, ...], after each step.
        logprobs: [B, T], per dimension, in nats; 0 for steps without noise.
        conditions: the denoiser's other arguments.
    """

    first: Tensor
    latents: Tensor
    logprobs: Tensor
    conditions: Conditions

    def __len__(self) -> int:
        return len(self.first)

    @property
    def schedule(self) -> Schedule:
        """The schedule alone."""
        return Schedule(steps=self.steps, times=self.times, call=self.call)

    @property
    def dimensions(self) -> int:
        """Numbers in the latents of an image, by which a mean over dimensions is multiplied for a sum."""
        return self.first[0].numel()

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        kept = [self.first, self.latents, self.logprobs, *self.conditions.tensors()]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)

    @classmethod
    def joined(cls, parts: Sequence[Trajectories]) -> Trajectories:
        """Returns the images of several calls of one pipeline with the same settings as one batch."""
        if len(parts) == 1:
            return parts[0]
        joined = Conditions.joined([part.conditions for part in parts], 0)
        first, latents = torch.cat([part.first for part in parts]), torch.cat([part.latents for part in parts])
        logprobs = torch.cat([part.logprobs for part in parts])
        return replace(parts[0], first=first, latents=latents, logprobs=logprobs, conditions=joined)

    def before(self, rows: Tensor, steps: Tensor, device: torch.device) -> Tensor:
        """Returns the latents [n, ...] before the steps `steps` [n] of the images `rows` [n]."""
        first = _take(self.first, rows)
        later = _take(self.latents, rows, (steps - 1).clamp(min=0)).to(first.dtype)
        is_first = along(steps == 0, first)
        return torch.where(is_first, first, later).to(device)

    def after(self, rows: Tensor, steps: Tensor, device: torch.device) -> Tensor:
        """Returns the latents [n, ...] after the steps `steps` [n] of the images `rows` [n]."""
        return _take(self.latents, rows, steps).to(self.first.dtype).to(device)

    def scored(self, rows: Tensor, steps: Tensor, device: torch.device) -> Tensor:
        """Returns the recorded log-probabilities [n] of the steps `steps` [n] of the images `rows` [n]."""
        return _take(self.logprobs, rows, steps).to(device)


def _take(values: Tensor, rows: Tensor, steps: Tensor | None = None) -> Tensor:
    """Returns the values [n, ...] of images, or of images at steps."""
    rows = rows.to(values.device)
    return values[rows] if steps is None else values[rows, steps.to(values.device)]


def replaced(tree: object, leaves: Mapping[Path, object], path: Path = ()) -> object:
    """Returns a copy of the tree with other leaves at some paths."""
    if isinstance(tree, Mapping):
        return {key: replaced(value, leaves, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [replaced(value, leaves, (*path, index)) for index, value in enumerate(tree)]
    return leaves.get(path, tree)
