"""The recorder of an unmodified diffusers pipeline, with hooks on its scheduler and its denoiser."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, cast

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from trimtab_diffusion.recording import Arguments, Conditions, Path, Trajectories, guided, replaced
from trimtab_diffusion.steps import Steps, gaussian_sample


def denoiser_name(pipeline: DiffusionPipeline) -> str:
    """Returns the name of the part of a pipeline that is trained and called once a step: `unet` or `transformer`.

    Raises:
        ValueError: the pipeline has neither.
    """
    for name in ("unet", "transformer"):
        if isinstance(getattr(pipeline, name, None), nn.Module):
            return name
    raise ValueError(
        f"{type(pipeline).__name__} has neither unet nor transformer, so there is no known denoiser to train. Use a "
        "pipeline with one of them."
    )


def record(
    pipeline: DiffusionPipeline,
    *,
    eta: float,
    generator: torch.Generator | None = None,
    storage_dtype: torch.dtype | None = None,
    storage_device: torch.device | str | None = None,
    **call: Any,
) -> tuple[Any, Trajectories]:
    """Calls `pipeline(generator=generator, **call)` and records its steps.

    Args:
        pipeline: its denoiser is called once a step, on the latents alone.
        eta: scale of the steps' noise, as for `Steps`; not 0.
        generator: of the noise.
        storage_dtype: latents are rounded to it after each step. The pipeline continues from the rounded latents, so
            that the stored latents are those that are scored. None: no rounding.
        storage_device: the device that keeps the trajectories. None: the pipeline's.
        call: arguments of the pipeline.

    Returns:
        The pipeline's images, and their trajectories.

    Raises:
        ValueError: eta is 0, the denoiser is called in another way, or the pipeline combines guidance in an unknown
            way.
    """
    if eta == 0:
        raise ValueError(
            "eta=0 makes every step deterministic, so that it has no log-probability. Use eta > 0 (DDIM: 1 is DDPM's "
            "noise; flow matching: 0.7 is usual), or call the diffusers pipeline itself to sample without recording."
        )
    recorder = _Recorder(pipeline, eta, generator, storage_dtype, storage_device)
    with recorder.watching():
        images = recorder.pipeline(generator=generator, **{**call, "return_dict": True}).images
    return images, recorder.trajectories()


class _Recorder:
    """Records the steps of one call of a pipeline."""

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        eta: float,
        generator: torch.Generator | None,
        storage_dtype: torch.dtype | None,
        storage_device: torch.device | str | None,
    ):
        self.pipeline = cast(Any, pipeline)  # diffusers does not declare the parts of a pipeline
        self.eta, self.generator = eta, generator
        self.dtype, self.device = storage_dtype, storage_device
        self.denoiser: nn.Module = getattr(pipeline, denoiser_name(pipeline))
        self.signature = inspect.signature(type(self.denoiser).forward)
        self.calls: list[tuple[Arguments, Tensor]] = []  # arguments and outputs of the denoiser since the last step
        self.inputs: list[Arguments] = []  # the denoiser's arguments other than latents and time, at each step
        self.times: list[Tensor] = []
        self.latents: list[Tensor] = []
        self.logprobs: list[Tensor] = []
        self.first: Tensor | None = None
        self.following = torch.empty(0)  # the latents after the last step
        self.name = ""
        self.steps: Steps | None = None
        self.guidance: float | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Records what the pipeline does inside the block."""
        scheduler = self.pipeline.scheduler
        stock = scheduler.step
        takes_eta = "eta" in inspect.signature(stock).parameters

        @wraps(stock)  # the pipeline reads the signature
        def step(
            model_output: Tensor, timestep: Tensor | float, sample: Tensor, *args: object, **kwargs: object
        ) -> object:
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

    def _see(self, module: nn.Module, args: tuple[object, ...], kwargs: Arguments, output: Sequence[Tensor]) -> None:
        """Remembers one call of the denoiser."""
        arguments = dict(self.signature.bind(module, *args, **kwargs).arguments)
        arguments.pop("self")
        arguments.pop("return_dict", None)
        arguments |= arguments.pop("kwargs", {})
        self.calls.append((arguments, output[0]))

    def _take_step(self, model_output: Tensor, sample: Tensor, following: Tensor) -> Tensor:
        """Records a step, and returns the latents from which the pipeline continues."""
        if len(self.calls) != 1:
            raise ValueError(
                f"{type(self.pipeline).__name__} called its denoiser {len(self.calls)} times for one step. DDPO can "
                "replay one call, with the latents without and with the prompt in one batch. Switch off the others."
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
                f"{type(self.pipeline).__name__} changed its guidance from {self.guidance} to {guidance} between two "
                "steps. DDPO replays all steps with one scale. Use no callback that changes it."
            )
        elif not torch.equal(sample, self.following):
            raise ValueError(
                f"{type(self.pipeline).__name__} changed the latents between two steps, which DDPO cannot replay. Use "
                "no callback that changes them, and for inpainting a denoiser with inputs for the mask."
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
        """Returns the scale of guidance, None without; checks that the scheduler got the guided output."""
        copies = len(seen) // len(sample)
        if copies not in (1, 2) or not torch.equal(seen, torch.cat([sample] * copies)):
            raise ValueError(
                f"The denoiser of {type(self.pipeline).__name__} reads {list(seen.shape)}, the scheduler steps from "
                f"{list(sample.shape)}. Use a denoiser that reads the latents alone, once or twice."
            )
        scale = float(self.pipeline.guidance_scale) if copies == 2 else None
        if not bool(torch.isfinite(model_output).all()):
            raise ValueError(
                "The denoiser's output is not finite. In half precision, try mixed_precision='bf16' or 'no'."
            )
        if not torch.equal(guided(output, scale), model_output):
            raise ValueError(
                f"{type(self.pipeline).__name__} changes the denoiser's output by more than classifier-free guidance. "
                "Set guidance_rescale=0 and switch off other guidance."
            )
        return scale

    def trajectories(self) -> Trajectories:
        """Returns what was recorded; checks that the pipeline took all steps of its schedule."""
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
                        f"{type(self.pipeline).__name__} changed the denoiser's {'.'.join(map(str, path))} between two "
                        "steps. DDPO can replay only values that do not change or that have a row for each image. Use "
                        "no callback that changes it."
                    )
                continue
            if all(one is value for one in seen):
                rows[path] = _by_image(value, copies).to(self.device)
            else:
                stepwise[path] = torch.stack([_by_image(one, copies) for one in seen], 1).to(self.device)
        template = cast(Arguments, replaced(self.inputs[0], dict.fromkeys([*rows, *stepwise])))
        return Trajectories(
            first=self.first.to(self.device),
            latents=torch.stack(self.latents, 1),
            logprobs=torch.stack(self.logprobs, 1).to(self.device),
            conditions=Conditions(template, rows, stepwise),
            steps=self.steps,
            times=torch.stack(self.times),
            guidance=self.guidance,
            name=self.name,
        )


def _is_same(one: object, other: object) -> bool:
    """Whether two arguments are equal."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or torch.equal(one, other)
    return one is other or one == other


def _by_image(value: Tensor, copies: int) -> Tensor:
    """Returns [k B, ...] as [B, k, ...]."""
    return value.detach().unflatten(0, (copies, -1)).transpose(0, 1)


def _leaves(tree: object, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields the leaves of nested dicts, lists and tuples, each with the keys that lead to it."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _leaves(value, (*path, index))
    else:
        yield path, tree
