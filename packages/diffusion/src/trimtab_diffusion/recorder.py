"""The recorder of an unmodified diffusers pipeline, with hooks on its scheduler and its denoiser."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, cast

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from trimtab_diffusion.steps import Steps, gaussian_sample
from trimtab_diffusion.trajectories import Arguments, Call, Conditions, Path, Trajectories, replaced

POSITIONS = ("txt_ids", "img_ids")
"""Arguments of denoisers that have a row per token and none per image."""


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
        pipeline: its denoiser is called once a step, on the latents alone; or twice, with the prompt and then without.
        eta: scale of the steps' noise, as for `Steps`; not 0.
        generator: draws the noise.
        storage_dtype: latents are rounded to it after each step. The pipeline continues from the rounded latents, so
            that the stored latents are those that are scored. None: no rounding.
        storage_device: the device that keeps the trajectories. None: the pipeline's.
        call: arguments of the pipeline.

    Returns:
        The pipeline's images or videos, and their trajectories.

    Raises:
        ValueError: eta is 0, the denoiser is called in another way, or the pipeline combines guidance in an unknown
            way.
    """
    if eta == 0:
        raise ValueError(
            "eta=0 makes every step deterministic, so that it has no log-probability. Use eta > 0 (DDIM: 1 is DDPM's "
            "noise; flow matching: 0.7 is usual), or call the diffusers pipeline itself to sample without recording."
        )
    recorder = _Recorder(pipeline, eta, generator, storage_dtype, storage_device, call)
    with recorder.watching():
        images = recorder.pipeline(generator=generator, **{**call, "return_dict": True})[0]  # .images, or .frames
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
        settings: Mapping[str, object],
    ):
        self.pipeline = cast(Any, pipeline)  # diffusers does not declare the parts of a pipeline
        self.settings = settings
        self.eta, self.generator = eta, generator
        self.dtype, self.device = storage_dtype, storage_device
        self.denoiser: nn.Module = getattr(pipeline, denoiser_name(pipeline))
        self.signature = inspect.signature(type(self.denoiser).forward)
        self.calls: list[tuple[Arguments, Tensor]] = []  # arguments and outputs of the denoiser since the last step
        self.inputs: list[list[Arguments]] = []  # of each step and call, the arguments other than latents and time
        self.times: list[Tensor] = []
        self.latents: list[Tensor] = []
        self.logprobs: list[Tensor] = []
        self.first: Tensor | None = None
        self.following = torch.empty(0)  # the latents after the last step
        self.steps: Steps | None = None
        self.call: Call | None = None

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
        copies = [len(next(iter(arguments.values()))) // len(sample) for arguments, _ in self.calls]
        if copies not in ([1], [2], [1, 1]):
            count = "1 time" if len(copies) == 1 else f"{len(copies)} times"
            raise ValueError(
                f"{type(self.pipeline).__name__} called its {denoiser_name(self.pipeline)} {count} for one step, on "
                f"{' and '.join(map(str, copies)) or 'no'} copies of the latents. DDPO can replay one copy, or one "
                "with the prompt and one without. Switch off the other guidance."
            )
        call = self._call(sample, model_output)
        inputs = [arguments for arguments, _ in self.calls]
        self.calls = []
        times = [arguments.pop("timestep") for arguments in inputs]
        for arguments in inputs:
            del arguments[call.name]
        if self.steps is None or self.call is None:
            self.steps, self.first, self.call = Steps.of(self.pipeline.scheduler, self.eta), sample, call
        elif call != self.call or len(inputs) != len(self.inputs[-1]):
            raise ValueError(
                f"{type(self.pipeline).__name__} changed its guidance from {self.call.guidance} to {call.guidance} "
                "between two steps. DDPO replays all steps with one scale. Use no callback that changes it."
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
        self.inputs.append(inputs)
        self.times.append(torch.as_tensor(times[0]).detach().cpu().reshape(-1)[0])
        self.latents.append(stored.to(self.device))
        self.logprobs.append(logprob)
        self.following = following
        return following

    def _call(self, sample: Tensor, model_output: Tensor) -> Call:
        """Returns how the denoiser was called for a step; checks that the scheduler got its guided output."""
        name = next(iter(self.calls[0][0]))
        seen = torch.cat([arguments[name] for arguments, _ in self.calls])
        output = torch.cat([output for _, output in reversed(self.calls)])  # the call with the prompt comes first
        copies = len(seen) // len(sample)
        if not torch.equal(seen, torch.cat([sample] * copies).to(seen.dtype)):
            raise ValueError(
                f"The denoiser of {type(self.pipeline).__name__} reads {list(seen.shape)}, the scheduler steps from "
                f"{list(sample.shape)}. Use a denoiser that reads the latents alone, once or twice."
            )
        if not bool(torch.isfinite(model_output).all()):
            raise ValueError(
                "The denoiser's output is not finite. In half precision, try mixed_precision='bf16' or 'no'."
            )
        call = Call(name, self._scale() if copies == 2 else None, dtype=seen.dtype)
        for each in (call, replace(call, keeps_norm=copies == 2)):
            if torch.equal(each.guided(output), model_output):
                return each
        raise ValueError(
            f"{type(self.pipeline).__name__} changes the denoiser's output by more than classifier-free guidance. "
            "Set guidance_rescale=0 and switch off other guidance."
        )

    def _scale(self) -> float:
        """The pipeline's scale of classifier-free guidance."""
        parameters = inspect.signature(type(self.pipeline).__call__).parameters
        if "true_cfg_scale" in parameters:  # its guidance_scale is embedded by the denoiser
            return float(cast(float, self.settings.get("true_cfg_scale", parameters["true_cfg_scale"].default)))
        return float(self.pipeline.guidance_scale)

    def trajectories(self) -> Trajectories:
        """Returns what was recorded; checks that the pipeline took all steps of its schedule."""
        if self.steps is None or self.first is None or self.call is None or len(self.latents) != len(self.steps):
            raise ValueError(
                f"{type(self.pipeline).__name__} took {len(self.latents)} of {len(self.pipeline.scheduler.timesteps)} "
                "steps. DDPO needs a pipeline that calls its scheduler's step for each of its timesteps."
            )
        calls = [self._conditions(inputs) for inputs in reversed(list(zip(*self.inputs, strict=True)))]
        return Trajectories(
            first=self.first.to(self.device),
            latents=torch.stack(self.latents, 1),
            logprobs=torch.stack(self.logprobs, 1).to(self.device),
            conditions=Conditions.joined(calls, 1),
            steps=self.steps,
            times=torch.stack(self.times),
            call=self.call,
        )

    def _conditions(self, inputs: Sequence[Arguments]) -> Conditions:
        """Returns the arguments of one of the calls that a step makes, from those at every step."""
        count = len(self.latents[0])
        copies = 2 if self.call is not None and self.call.guidance is not None and len(self.inputs[0]) == 1 else 1
        rows: dict[Path, Tensor] = {}
        stepwise: dict[Path, Tensor] = {}
        leaves = [dict(_leaves(arguments)) for arguments in inputs]
        for path, value in leaves[0].items():
            seen = [at_step[path] for at_step in leaves]
            has_rows = isinstance(value, Tensor) and value.dim() > 0 and len(value) == count * copies
            if not has_rows or path[0] in POSITIONS:
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
        return Conditions(cast(Arguments, replaced(inputs[0], dict.fromkeys([*rows, *stepwise]))), rows, stepwise)


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
