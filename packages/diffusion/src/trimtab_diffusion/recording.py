"""Trajectories out of an unmodified diffusers pipeline: its scheduler and its denoiser are watched."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from accelerate.utils import send_to_device
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from trimtab_diffusion.steps import Steps, along, gaussian_sample

Path = tuple[Any, ...]


def denoiser_name(pipeline: DiffusionPipeline) -> str:
    """`unet` or `transformer`: the part of a pipeline that is called once a step, and trained."""
    for name in ("unet", "transformer"):
        if isinstance(getattr(pipeline, name, None), nn.Module):
            return name
    raise ValueError(f"{type(pipeline).__name__} has neither unet nor transformer: there is nothing known to train.")


def record(
    pipeline: Any,
    *,
    eta: float,
    generator: torch.Generator | None = None,
    storage_dtype: torch.dtype | None = None,
    storage_device: torch.device | str | None = None,
    **call: Any,
) -> tuple[Any, Trajectories]:
    """What `pipeline(generator=generator, **call)` draws, and how it got there.

    eta: noise of the steps, as for `Steps`. storage_dtype: latents are rounded to it after each step, and the pipeline
    goes on from the rounded ones, so that what is scored is what is stored; None keeps them as they are.
    storage_device: where trajectories are kept; None is where they arise. Returns the pipeline's images, and their
    trajectories.

    Raises ValueError for eta=0, which has no log-probabilities, and for a pipeline whose denoiser is not called once a
    step on the latents alone, or which combines guidance in an unknown way.
    """
    if eta == 0:
        raise ValueError(
            "eta=0 makes every step deterministic, so that it has no log-probability. Use eta > 0 (DDIM: 1 is DDPM's "
            "noise; flow matching: 0.7 is usual), or call the diffusers pipeline itself to draw without recording."
        )
    recorder = _Recorder(pipeline, eta, generator, storage_dtype, storage_device)
    with recorder.watching():
        images = pipeline(generator=generator, **{**call, "return_dict": True}).images
    return images, recorder.trajectories()


@dataclass
class Conditions:
    """The denoiser's inputs besides latents and time, each tensor once: for all steps where it stays the same.

    template: the arguments as the pipeline gives them, whatever is not one row per image. rows: [B, k, ...] and
    stepwise: [B, T, k, ...], the tensors that have a row per image, k = 2 with guidance (without, with the prompt).
    """

    template: dict[str, Any]
    rows: dict[Path, Tensor]
    stepwise: dict[Path, Tensor]

    def select(self, rows: Tensor, steps: Tensor, device: torch.device) -> dict[str, Any]:
        """Arguments for the n pairs of image `rows` [n] and step `steps` [n], their tensors [k n, ...]."""
        leaves = {path: _take(value, rows) for path, value in self.rows.items()}
        leaves |= {path: _take(value, rows, steps) for path, value in self.stepwise.items()}
        flat = {path: send_to_device(value.transpose(0, 1).flatten(0, 1), device) for path, value in leaves.items()}
        return send_to_device(_replaced(self.template, flat), device)

    def tensors(self) -> list[Tensor]:
        return [*self.rows.values(), *self.stepwise.values()]


@dataclass
class Trajectories:
    """B images on their way through T steps.

    first: [B, ...], the noise that the pipeline drew. latents: [B, T, ...] after each step. logprobs: [B, T], per
    dimension, 0 for steps without noise. times: [T], what the denoiser was told. guidance: its scale, None without.
    """

    first: Tensor
    latents: Tensor
    logprobs: Tensor
    conditions: Conditions
    steps: Steps
    times: Tensor
    guidance: float | None
    name: str  # of the denoiser's argument that takes latents

    def __len__(self) -> int:
        return len(self.first)

    @property
    def dimensions(self) -> int:
        """Numbers in the latents of an image: what turns a mean over dimensions into nats."""
        return self.first[0].numel()

    @property
    def nbytes(self) -> int:
        """Memory of everything that is kept."""
        kept = [self.first, self.latents, self.logprobs, *self.conditions.tensors()]
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)

    @classmethod
    def joined(cls, parts: Sequence[Trajectories]) -> Trajectories:
        """The images of several calls of one pipeline with the same settings."""
        start, conditions = parts[0], [part.conditions for part in parts]
        joined = Conditions(
            start.conditions.template,
            {path: torch.cat([each.rows[path] for each in conditions]) for path in start.conditions.rows},
            {path: torch.cat([each.stepwise[path] for each in conditions]) for path in start.conditions.stepwise},
        )
        first, latents = torch.cat([part.first for part in parts]), torch.cat([part.latents for part in parts])
        logprobs = torch.cat([part.logprobs for part in parts])
        return replace(start, first=first, latents=latents, logprobs=logprobs, conditions=joined)

    def before(self, rows: Tensor, steps: Tensor, device: torch.device) -> Tensor:
        """Latents [n, ...] from which the images `rows` [n] took their steps `steps` [n], as the denoiser saw them."""
        drawn = _take(self.first, rows)
        later = _take(self.latents, rows, (steps - 1).clamp(min=0)).to(drawn.dtype)
        is_first = along(steps == 0, drawn)
        return torch.where(is_first, drawn, later).to(device)

    def after(self, rows: Tensor, steps: Tensor, device: torch.device) -> Tensor:
        """Latents [n, ...] to which they took them."""
        return _take(self.latents, rows, steps).to(self.first.dtype).to(device)

    def scored(self, rows: Tensor, steps: Tensor, device: torch.device) -> Tensor:
        """Log-probabilities [n] of having taken them, when drawn."""
        return _take(self.logprobs, rows, steps).to(device)

    def predict(self, denoiser: nn.Module, latents: Tensor, rows: Tensor, steps: Tensor) -> Tensor:
        """What the denoiser says of `latents` [n, ...] under the conditions of `rows` at `steps`, both [n].

        One call, with guidance as in the pipeline. rows, steps: int64 on the CPU. Returns [n, ...].
        """
        arguments = self.conditions.select(rows, steps, latents.device)
        return predict(
            denoiser, latents, self.times[steps].to(latents.device), arguments, guidance=self.guidance, name=self.name
        )


def predict(
    denoiser: nn.Module,
    latents: Tensor,
    times: Tensor,
    conditions: Mapping[str, Any],
    *,
    guidance: float | None,
    name: str = "sample",
) -> Tensor:
    """The denoiser's output for latents [n, ...] at times [n]; with a scale guided, of conditions of 2n rows.

    Classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598, Eq. 6, w + 1 being the scale here).
    """
    copies = 1 if guidance is None else 2
    inputs = {name: torch.cat([latents] * copies), "timestep": times.repeat(copies)}
    return guided(denoiser(**inputs, **conditions, return_dict=False)[0], guidance)


def guided(output: Tensor, guidance: float | None) -> Tensor:
    """Outputs without and with the prompt, [2n, ...], as one [n, ...]; without a scale the output as it is."""
    if guidance is None:
        return output
    without, with_prompt = output.chunk(2)
    return without + guidance * (with_prompt - without)


class _Recorder:
    """Stands beside a pipeline during one call."""

    def __init__(
        self,
        pipeline: Any,
        eta: float,
        generator: torch.Generator | None,
        storage_dtype: torch.dtype | None,
        storage_device: torch.device | str | None,
    ):
        self.pipeline, self.eta, self.generator = pipeline, eta, generator
        self.dtype, self.device = storage_dtype, storage_device
        self.denoiser: nn.Module = getattr(pipeline, denoiser_name(pipeline))
        self.signature = inspect.signature(type(self.denoiser).forward)
        self.calls: list[tuple[dict[str, Any], Tensor]] = []  # the denoiser's, since the last step: arguments, output
        self.inputs: list[dict[str, Any]] = []  # its other arguments at each step
        self.times: list[Tensor] = []
        self.latents: list[Tensor] = []
        self.logprobs: list[Tensor] = []
        self.first: Tensor | None = None
        self.following = torch.empty(0)  # what the last step led to
        self.name = ""
        self.steps: Steps | None = None
        self.guidance: float | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        scheduler = self.pipeline.scheduler
        stock = scheduler.step
        takes_eta = "eta" in inspect.signature(stock).parameters

        @wraps(stock)  # the pipeline reads the signature
        def step(model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
            result = stock(model_output, timestep, sample, *args, **kwargs | ({"eta": self.eta} if takes_eta else {}))
            following = result[0] if isinstance(result, tuple) else result.prev_sample
            following = self._take_step(model_output, sample, following)
            if isinstance(result, tuple):
                return (following, *result[1:])
            result.prev_sample = following
            return result

        hook = self.denoiser.register_forward_hook(self._see, with_kwargs=True)
        scheduler.step = step
        try:
            yield
        finally:
            del scheduler.step
            hook.remove()

    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        arguments = dict(self.signature.bind(module, *args, **kwargs).arguments)
        arguments.pop("self")
        arguments.pop("return_dict", None)
        arguments |= arguments.pop("kwargs", {})
        self.calls.append((arguments, output[0]))

    def _take_step(self, model_output: Tensor, sample: Tensor, following: Tensor) -> Tensor:
        """Record a step, and return the latents that the pipeline goes on with."""
        if len(self.calls) != 1:
            raise ValueError(
                f"{type(self.pipeline).__name__} called its denoiser {len(self.calls)} times for one step; DDPO can "
                "replay one call, of latents without and with the prompt in one batch. Switch off what adds others."
            )
        arguments, output = self.calls.pop()
        name = next(iter(arguments))
        seen, time = arguments.pop(name), arguments.pop("timestep")
        guidance = self._guidance(seen, sample, output, model_output)
        if self.steps is None:
            self.steps, self.first, self.name = Steps.of(self.pipeline.scheduler, self.eta), sample, name
            self.guidance = guidance
        elif guidance != self.guidance:
            raise ValueError(
                f"{type(self.pipeline).__name__} changed its guidance from {self.guidance} to {guidance} on the way; "
                "DDPO replays all steps with one scale. Use one, and no callback that changes it."
            )
        elif not torch.equal(sample, self.following):
            raise ValueError(
                f"{type(self.pipeline).__name__} changed the latents between two steps, which no replay would know. "
                "Use no callback that changes them, and for inpainting a denoiser with inputs for the mask."
            )
        index = torch.full((len(sample),), len(self.latents))
        random = bool(self.steps.is_random[len(self.latents)])
        if self.steps.is_flow:
            mean, std = self.steps.gaussian(model_output, sample, index)
            following = gaussian_sample(mean, std, self.generator)
        following = following.to(sample.dtype)  # autocast may have widened it
        stored = following if self.dtype is None else following.to(self.dtype)
        following = stored.to(following.dtype)
        logprob = (
            self.steps.logprob(model_output, sample, following, index)
            if random
            else torch.zeros(len(sample), device=sample.device)
        )
        self.inputs.append(arguments)
        self.times.append(torch.as_tensor(time).detach().cpu().reshape(-1)[0])
        self.latents.append(stored.to(self.device))
        self.logprobs.append(logprob.detach())
        self.following = following
        return following

    def _guidance(self, seen: Tensor, sample: Tensor, output: Tensor, model_output: Tensor) -> float | None:
        """The scale of guidance, None without; ValueError if what the scheduler got is not made of it."""
        copies = len(seen) // len(sample)
        if copies not in (1, 2) or not torch.equal(seen, torch.cat([sample] * copies)):
            raise ValueError(
                f"The denoiser of {type(self.pipeline).__name__} reads {list(seen.shape)}, the scheduler steps from "
                f"{list(sample.shape)}. DDPO can replay a denoiser that reads the latents alone, once or twice."
            )
        scale = float(self.pipeline.guidance_scale) if copies == 2 else None
        if not bool(torch.isfinite(model_output).all()):
            raise ValueError(
                "The denoiser's output is not finite. In half precision, try mixed_precision='bf16' or 'no'."
            )
        if not torch.equal(guided(output, scale), model_output):
            raise ValueError(
                f"{type(self.pipeline).__name__} turns the denoiser's output into something else than classifier-free "
                "guidance at its scale. Set guidance_rescale=0 and switch off other guidance."
            )
        return scale

    def trajectories(self) -> Trajectories:
        if self.steps is None or self.first is None or len(self.latents) != len(self.steps):
            raise ValueError(
                f"{type(self.pipeline).__name__} took {len(self.latents)} of {len(self.pipeline.scheduler.timesteps)} "
                "steps. DDPO needs a pipeline that calls its scheduler's step for each of its timesteps."
            )
        count, copies = len(self.first), 1 if self.guidance is None else 2
        rows: dict[Path, Tensor] = {}
        stepwise: dict[Path, Tensor] = {}
        leaves = [dict(_leaves(inputs)) for inputs in self.inputs]
        for path, value in leaves[0].items():
            seen = [at_step[path] for at_step in leaves]
            if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != count * copies:
                if not all(_is_same(one, value) for one in seen):
                    raise ValueError(
                        f"{type(self.pipeline).__name__} changed the denoiser's {'.'.join(map(str, path))} on the way; "
                        "DDPO can replay what stays the same, or has a row for each picture. Use no callback that "
                        "changes it."
                    )
                continue
            if all(one is value for one in seen):
                rows[path] = _by_image(value, copies).to(self.device)
            else:
                stepwise[path] = torch.stack([_by_image(one, copies) for one in seen], 1).to(self.device)
        return Trajectories(
            self.first.to(self.device), torch.stack(self.latents, 1), torch.stack(self.logprobs, 1).to(self.device),
            Conditions(_replaced(self.inputs[0], dict.fromkeys([*rows, *stepwise])), rows, stepwise), self.steps,
            torch.stack(self.times), self.guidance, self.name,
        )  # fmt: skip


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (torch.equal(one, other) if isinstance(one, Tensor) else one == other)


def _by_image(value: Tensor, copies: int) -> Tensor:
    """[k B, ...] as [B, k, ...]."""
    return value.detach().unflatten(0, (copies, -1)).transpose(0, 1)


def _take(values: Tensor, rows: Tensor, steps: Tensor | None = None) -> Tensor:
    rows = rows.to(values.device)
    return values[rows] if steps is None else values[rows, steps.to(values.device)]


def _leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Everything in nested dicts, lists and tuples that is none, with the keys that lead to it."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _leaves(value, (*path, index))
    else:
        yield path, tree


def _replaced(tree: Any, leaves: Mapping[Path, Any], path: Path = ()) -> Any:
    """The tree with other leaves at some paths."""
    if isinstance(tree, Mapping):
        return {key: _replaced(value, leaves, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_replaced(value, leaves, (*path, index)) for index, value in enumerate(tree)]
    return leaves.get(path, tree)
