"""The recorder of an unmodified diffusers pipeline, with hooks on its scheduler and its denoiser."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, TypeAlias, cast

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from trimtab_common.accelerators import moved
from trimtab_common.health import TrainingDivergedError
from trimtab_diffusion.compat.trees import tree_map_with_path
from trimtab_diffusion.steps import Steps, gaussian_logprob, gaussian_sample
from trimtab_diffusion.trajectories import Arguments, Fixed, Schedule, Trajectories, guided, joined

Asked: TypeAlias = tuple[str, float | None, torch.dtype]
"""How a denoiser is asked: the fields `name`, `guidance` and `dtype` of `Schedule`."""
Finish: TypeAlias = Callable[[Trajectories], Tensor]
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
    window: tuple[int, int] | None = None,
    generator: torch.Generator | None = None,
    storage_dtype: torch.dtype | None = None,
    storage_device: torch.device | str | None = None,
    finish: Finish | None = None,
    **call: Any,
) -> tuple[Any, Trajectories]:
    """Calls `pipeline(generator=generator, **call)` and records its steps.

    Args:
        pipeline: its denoiser is called once a step, on the latents alone; or twice, with the prompt and then without.
        eta: scale of the steps' noise, as for `Steps`; not 0.
        window: the steps that have noise, as for `Steps`.
        generator: draws the noise.
        storage_dtype: latents are rounded to it after each step. The pipeline continues from the rounded latents, so
            that the stored latents are those that are scored. None: no rounding.
        storage_device: the device that keeps the trajectories. None: the pipeline's.
        finish: gives the latents that the pipeline decodes in place of the last ones. It and the decoder run with
            gradients.
        call: arguments of the pipeline.

    Returns:
        The pipeline's images or videos, and their trajectories.

    Raises:
        ValueError: eta is 0, the denoiser is called in another way, or the pipeline combines guidance in an unknown
            way.
        TrainingDivergedError: the denoiser's output is not finite.
    """
    if eta == 0:
        raise ValueError(
            "eta=0 makes every step deterministic, so that it has no log-probability. Use eta > 0 (DDIM: 1 is DDPM's "
            "noise; flow matching: 0.7 is usual), or call the diffusers pipeline itself to sample without recording."
        )
    recorder = _Recorder(pipeline, eta, window, generator, storage_dtype, storage_device, finish, call)
    pipe = recorder.pipeline
    stock = pipe.scheduler.step
    hook = recorder.denoiser.register_forward_hook(recorder.see, with_kwargs=True)
    pipe.scheduler.step = wraps(stock)(partial(recorder.step, stock))  # the pipeline reads the signature
    try:
        images = pipe(generator=generator, **{**call, "return_dict": True})[0]  # .images, or .frames
    finally:
        del pipe.scheduler.step
        hook.remove()
    return images, recorder.trajectories()


def same(one: Tensor, other: Tensor) -> Tensor:
    """Whether two tensors are equal, on their device, which nothing waits for."""
    return (one == other).all() if one.shape == other.shape else torch.tensor(False, device=one.device)


class _Recorder:
    """Records the steps of one call of a pipeline."""

    steps: Steps
    first: Tensor
    read: list[int]  # the shape of what the denoiser reads in a step
    asked: Asked
    time: Tensor

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        eta: float,
        window: tuple[int, int] | None,
        generator: torch.Generator | None,
        storage_dtype: torch.dtype | None,
        storage_device: torch.device | str | None,
        finish: Finish | None,
        settings: Mapping[str, Any],
    ):
        self.pipeline = cast(Any, pipeline)  # diffusers does not declare the parts of a pipeline
        self.eta, self.generator, self.dtype, self.device = eta, generator, storage_dtype, storage_device
        self.window, self.finish = window, finish
        self.denoiser: nn.Module = getattr(pipeline, denoiser_name(pipeline))
        self.signature = inspect.signature(type(self.denoiser).forward)
        default = inspect.signature(type(pipeline).__call__).parameters.get("true_cfg_scale")
        # A pipeline that takes it embeds its guidance_scale.
        self.scale = None if default is None else settings.get("true_cfg_scale", default.default)
        # Calls of the denoiser since the last step: the argument that takes the latents, these, others, and the output.
        self.calls: list[tuple[str, Tensor, Arguments, Tensor]] = []
        self.inputs: list[tuple[Arguments, ...]] = []  # of each step and call, arguments other than latents and time
        self.times: list[Tensor] = []
        self.checks: list[Tensor] = []  # [5] of each step, see `_check`
        self.latents: list[Tensor] = []
        self.logprobs: list[Tensor] = []
        self.following = torch.empty(0)  # the latents after the last step
        self.path: Trajectories | None = None  # of all steps, once `finish` has them

    def see(self, module: nn.Module, args: tuple[object, ...], kwargs: Arguments, output: Sequence[Tensor]) -> None:
        """Remembers one call of the denoiser."""
        arguments = dict(self.signature.bind(module, *args, **kwargs).arguments)
        arguments.pop("self")
        arguments.pop("return_dict", None)
        arguments |= arguments.pop("kwargs", {})
        self.time = torch.as_tensor(arguments.pop("timestep")).detach().reshape(-1)[0]
        name = next(iter(arguments))
        self.calls.append((name, arguments.pop(name), arguments, output[0]))

    def step(
        self, stock: Any, model_output: Tensor, timestep: object, sample: Tensor, *args: object, **kwargs: object
    ) -> object:
        """Takes a step of the scheduler, and records it."""
        asked, inputs = self._asked(sample, model_output)
        if not self.latents:
            self.steps, self.first, self.asked = Steps.of(self.pipeline.scheduler, self.eta, self.window), sample, asked
        elif asked != self.asked or len(inputs) != len(self.inputs[-1]):
            raise ValueError(
                f"{type(self.pipeline).__name__} changed its guidance from {self.asked[1]} to {asked[1]} between two "
                "steps. A replay takes all steps with one scale. Use no callback that changes it."
            )
        number, is_flow = len(self.latents), self.steps.is_flow
        mean, std = self.steps.gaussian(model_output, sample, torch.full((len(sample),), number))
        if not is_flow:  # DDIM looks its numbers up on the host, and would wait for a timestep on a device
            eta = self.eta * bool(self.steps.is_random[number])
            timestep, kwargs = self.steps.timesteps[number], kwargs | {"eta": eta}
        result = stock(model_output, timestep, sample, *args, **kwargs)
        following = gaussian_sample(mean, std, self.generator) if is_flow else result[0]
        stored = following.to(sample.dtype).to(self.dtype or sample.dtype)  # autocast may have widened it
        self.following = following = stored.to(sample.dtype)
        self.times.append(self.time)
        self.inputs.append(inputs)
        self.latents.append(stored.to(self.device))
        self.logprobs.append(
            gaussian_logprob(following, mean, std) if self.steps.is_random[number] else torch.zeros_like(std)
        )
        if self.finish is not None and len(self.latents) == len(self.steps):
            torch.set_grad_enabled(True)  # until the pipeline's call ends, which restores what was before it
            self.path = self.trajectories()
            following = self.finish(self.path).to(sample.dtype)
        if isinstance(result, tuple):
            return (following, *result[1:])
        result.prev_sample = following
        return result

    def _asked(self, sample: Tensor, model_output: Tensor) -> tuple[Asked, tuple[Arguments, ...]]:
        """Returns the denoiser's calls of a step, and their arguments other than the latents; `_check` checks the rest.

        Raises:
            ValueError: the denoiser was called in another way than once or twice.
        """
        kind, (calls, self.calls) = type(self.pipeline).__name__, (self.calls, [])
        copies = [len(read) // len(sample) for _, read, *_ in calls]
        if copies not in ([1], [2], [1, 1]):
            count = "1 time" if len(copies) == 1 else f"{len(copies)} times"
            raise ValueError(
                f"{kind} called its {denoiser_name(self.pipeline)} {count} for one step, on "
                f"{' and '.join(map(str, copies)) or 'no'} copies of the latents. A replay calls it on one copy, or "
                "on one with the prompt and one without. Switch off the other guidance."
            )
        (name, *_), reads, inputs, outputs = zip(*calls, strict=True)
        seen = torch.cat(reads)
        self.read, scale = list(seen.shape), None
        if sum(copies) == 2:
            scale = float(self.pipeline.guidance_scale if self.scale is None else self.scale)
        output = torch.cat(outputs[::-1])  # the call with the prompt comes first
        checks = [
            same(seen, torch.cat([sample] * sum(copies)).to(seen.dtype)),
            torch.isfinite(model_output).all(),
            same(guided(output, scale), model_output),
            same(guided(output, scale, keeps_norm=True), model_output),
            same(sample, self.following if self.latents else sample),
        ]
        self.checks.append(torch.stack(checks))
        return (name, scale, seen.dtype), inputs

    def _check(self, checks: Tensor) -> bool:
        """Whether guidance keeps norms.

        Args:
            checks: [T, 5], on the host. At each step: whether the denoiser read the latents alone, whether its output
                is finite, whether the scheduler got it after guidance, the same for guidance that keeps norms, and
                whether the latents are those after the step before.

        Raises:
            ValueError: a step cannot be replayed.
            TrainingDivergedError: the denoiser's output is not finite.
        """
        kind = type(self.pipeline).__name__
        if not bool(checks[:, 1].all()):  # first: NaN is not equal to itself
            raise TrainingDivergedError(
                "The denoiser's output is not finite. In half precision, try mixed_precision='bf16' or 'no'; after "
                "updates, resume from the last checkpoint with a lower learning rate."
            )
        keeps_norm = not bool(checks[:, 2].all())
        for reads_latents, _, *is_guided, is_unchanged in checks.tolist():
            if not reads_latents:
                raise ValueError(
                    f"The denoiser of {kind} reads {self.read}, the scheduler steps from {list(self.first.shape)}. Use "
                    "a denoiser that reads the latents alone, once or twice."
                )
            if not is_guided[keeps_norm]:
                raise ValueError(
                    f"{kind} changes the denoiser's output by more than classifier-free guidance. Set "
                    "guidance_rescale=0 and switch off other guidance."
                )
            if not is_unchanged:
                raise ValueError(
                    f"{kind} changed the latents between two steps, which cannot be replayed. Use no callback that "
                    "changes them, and for inpainting a denoiser with inputs for the mask."
                )
        return keeps_norm

    def trajectories(self) -> Trajectories:
        """Returns the recorded trajectories, if all steps can be replayed; waits for the device once to know it."""
        if not self.latents or len(self.latents) != len(self.steps):
            raise ValueError(
                f"{type(self.pipeline).__name__} took {len(self.latents)} of {len(self.pipeline.scheduler.timesteps)} "
                "steps. Use a pipeline that calls its scheduler's step for each of its timesteps."
            )
        if self.path is not None:
            return self.path
        checks, times = moved([torch.stack(self.checks), torch.stack(self.times)], torch.device("cpu"))
        name, scale, dtype = self.asked
        calls = [
            tree_map_with_path(self._over_steps, *arguments)
            for arguments in reversed(list(zip(*self.inputs, strict=True)))
        ]
        return Trajectories(
            Schedule(self.steps, times, name, scale, self._check(checks), dtype),
            first=self.first.to(self.device),
            latents=torch.stack(self.latents, 1),
            logprobs=torch.stack(self.logprobs, 1).to(self.device),
            conditions=joined(calls, dim=2),
        )

    def _over_steps(self, path: Sequence[Any], *seen: object) -> Tensor | Fixed:
        """Returns an argument of the denoiser at all steps, as a leaf of `Trajectories.conditions`."""
        name, value, is_same = path[0].key, seen[0], len(set(map(id, seen))) == 1
        copies = 1 if self.asked[1] is None else 2 // len(self.inputs[0])
        count = len(self.first) * copies
        if isinstance(value, Tensor) and value.dim() and len(value) == count and name not in POSITIONS:
            over_steps = torch.stack(cast(list[Tensor], [*seen[:1]] if is_same else [*seen])).detach()
            return over_steps.unflatten(1, (copies, -1)).movedim(2, 0).to(self.device)
        fixed = Fixed(value)
        if not is_same and not all(fixed.is_same(Fixed(one)) for one in seen):
            raise ValueError(
                f"{type(self.pipeline).__name__} changed the denoiser's {name} between two steps. Only values that do "
                "not change or that have a row for each image can be replayed. Use no callback that changes it."
            )
        return fixed
