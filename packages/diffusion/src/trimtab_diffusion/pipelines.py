"""The pipelines that the trainers train: any diffusers pipeline whose denoiser is called once a step."""

import inspect
import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from diffusers import DDIMScheduler, DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from trimtab_common.overrides import replaced
from trimtab_diffusion.lora import LORA_FILE, add_lora, base_of_lora, has_adapters, save_lora, stored_file, without_lora
from trimtab_diffusion.recorder import Finish, denoiser_name, record
from trimtab_diffusion.steps import Scheduler, Steps, gaussian_logprob, gaussian_sample
from trimtab_diffusion.trajectories import Schedule, Trajectories

UNUSED = {
    "scheduler_step": "Trainers compute steps from the pipeline's scheduler: set pipeline.scheduler, and the config's "
    "sample_eta for their noise.",
    "autocast": "Trainers use their accelerator's: set the config's mixed_precision.",
}
"""Methods of 2024 that are for callers alone, and what to set instead of replacing them."""


@dataclass
class DDPOPipelineOutput:
    """The images or videos of one call of a pipeline, and their steps.

    Args:
        images: the pipeline's output; for output_type="pt" images [B, 3, H, W] or videos [B, F, 3, H, W] within [0, 1].
        latents: T + 1 tensors [B, ...], noise first.
        log_probs: T tensors [B], per dimension, in nats.
        trajectories: the same steps with everything that a replay needs.
    """

    images: Any
    latents: list[Tensor]
    log_probs: list[Tensor]
    trajectories: Trajectories = field(repr=False)


@dataclass
class DDPOSchedulerOutput:
    """The result of one step.

    Args:
        latents: [B, ...], after the step.
        log_probs: [B], log-probability of the step per dimension, in nats.
    """

    latents: Tensor
    log_probs: Tensor


class DDPOStableDiffusionPipeline:
    """A diffusers pipeline that is ready for a trainer: the denoiser trains, and everything else is frozen.

    A scheduler whose steps have no log-probability is replaced, with a warning. A safety checker is switched off, with
    a warning, because it would pass black images to the reward.

    Args:
        pipeline: Stable Diffusion 1.x to 3.x, SDXL, ControlNet, Flux, Qwen-Image, Wan, or another whose denoiser (unet
            or transformer) is called once a step, or once with the prompt and then once without.
        use_lora: whether to train adapters instead of all weights: those that the denoiser has
            (`pipeline.load_lora_weights`), or new ones. Without it a pipeline with adapters is refused.
        lora_rank: the rank of new adapters.
        call_kwargs: more arguments of every call of the pipeline, such as height and width, or a ControlNet's image;
            trainers refuse those that they pass, such as num_inference_steps.

    Raises:
        TypeError: a subclass replaces `scheduler_step` or `autocast`, which no trainer calls.

    Attributes:
        schedule: the schedule of the last call; None before the first.
        guidance_argument: the pipeline's argument for the scale of guidance: of its embedded guidance, or else
            classifier-free.
        takes_negative_prompt: whether the pipeline has such an argument.
        has_new_adapters: whether it made its adapters, so that the reference is the denoiser without them.
        has_trained: whether a trainer has taken a step.
    """

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        *,
        use_lora: bool = False,
        lora_rank: int = 4,
        call_kwargs: Mapping[str, Any] | None = None,
    ):
        for name in replaced(self, DDPOStableDiffusionPipeline, *UNUSED):
            raise TypeError(f"{type(self).__name__} replaces {name}, which no trainer calls. {UNUSED[name]}")
        self.sd_pipeline = cast(Any, pipeline)  # diffusers does not declare the parts of a pipeline
        self.call_kwargs = dict(call_kwargs or {})
        self.use_lora = use_lora
        self.schedule: Schedule | None = None
        self.name = denoiser_name(pipeline)
        adapted = [name for name, part in self.sd_pipeline.components.items() if has_adapters(part)]
        if adapted and not use_lora:
            raise ValueError(
                f"The pipeline has adapters on {', '.join(adapted)}, and use_lora=False trains whole weights. Pass "
                "DDPOStableDiffusionPipeline(pipeline, use_lora=True) to train adapters, or merge these before: "
                "pipeline.fuse_lora(); pipeline.unload_lora_weights()."
            )
        arguments = inspect.signature(type(pipeline).__call__).parameters
        self.takes_negative_prompt = "negative_prompt" in arguments
        is_embedded = "true_cfg_scale" not in arguments or self.denoiser.config.get("guidance_embeds")
        self.guidance_argument = "guidance_scale" if is_embedded else "true_cfg_scale"
        self.kind: Any = type(self.denoiser)  # FSDP gives its modules classes of their own
        self.sd_pipeline.scheduler = trainable_scheduler(self.sd_pipeline.scheduler)
        if getattr(self.sd_pipeline, "safety_checker", None) is not None:
            warnings.warn("The safety checker is off: it would pass black images to the reward.", stacklevel=2)
            self.sd_pipeline.safety_checker = None
        for part in self.sd_pipeline.components.values():
            if isinstance(part, nn.Module):
                part.requires_grad_(False).eval()
        self.has_new_adapters = use_lora and self.name not in adapted
        self.has_trained = False
        if use_lora:
            add_lora(self.denoiser, rank=lora_rank)
        else:
            self.denoiser.requires_grad_(True)

    @property
    def denoiser(self) -> Any:
        """The unet or transformer, which trains."""
        return getattr(self.sd_pipeline, self.name)

    @property
    def unet(self) -> Any:
        """The denoiser, by its documented name."""
        return self.denoiser

    @property
    def vae(self) -> nn.Module:
        """The pipeline's autoencoder."""
        return self.sd_pipeline.vae

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The pipeline's tokenizer."""
        return self.sd_pipeline.tokenizer

    @property
    def text_encoder(self) -> nn.Module:
        """The pipeline's text encoder."""
        return self.sd_pipeline.text_encoder

    @property
    def scheduler(self) -> Scheduler:
        """The pipeline's scheduler. One whose steps have no log-probability is replaced, with a warning."""
        return self.sd_pipeline.scheduler

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        self.sd_pipeline.scheduler = trainable_scheduler(scheduler)

    @property
    def device(self) -> torch.device:
        """The pipeline's device."""
        return self.sd_pipeline.device

    @torch.no_grad()
    def __call__(
        self,
        *args: Any,
        eta: float = 1.0,
        window: tuple[int, int] | None = None,
        storage_dtype: torch.dtype | None = None,
        storage_device: torch.device | str | None = None,
        finish: Finish | None = None,
        **kwargs: Any,
    ) -> DDPOPipelineOutput:
        """Samples images or videos and records the steps: see `recorder.record`.

        Args:
            args: the prompt, or nothing.
            eta: scale of the steps' noise.
            window: the first step that has noise, and the first one after it that has none; None: all have.
            storage_dtype, storage_device: the dtype and the device that keep the trajectories.
            finish: gives the latents that are decoded, with a gradient.
            kwargs: arguments of the pipeline, before those of `call_kwargs`.

        Raises:
            TypeError: `args` is more than the prompt, or `kwargs` has the prompt, too.
        """
        if len(args) > 1 or (args and "prompt" in kwargs):
            raise TypeError(
                f"{len(args)} positional arguments came, and {', '.join(kwargs) or 'nothing'} by name. Pass the prompt "
                "once, and everything else by name, such as height=512."
            )
        if args:
            kwargs = {"prompt": args[0], **kwargs}
        images, path = record(
            self.sd_pipeline,
            eta=eta,
            window=window,
            storage_dtype=storage_dtype,
            storage_device=storage_device,
            finish=finish,
            **{**self.call_kwargs, **kwargs},
        )
        self.schedule = path.schedule
        return DDPOPipelineOutput(images, [path.first, *path.latents.unbind(1)], list(path.logprobs.unbind(1)), path)

    def scheduler_step(
        self,
        model_output: Tensor,
        timestep: Tensor | float,
        sample: Tensor,
        eta: float = 1.0,
        generator: torch.Generator | None = None,
        prev_sample: Tensor | None = None,
    ) -> DDPOSchedulerOutput:
        """Takes one step, or computes the log-probability of a given one.

        Not for replacing: trainers compute steps from the scheduler.

        Args:
            model_output: [B, ...], of the denoiser.
            sample: [B, ...], before the step.
            timestep: one number, or [B].
            eta: scale of the noise.
            generator: draws the noise.
            prev_sample: [B, ...], the sample after the step; None: sample it.
        """
        steps = Steps.of(self.scheduler, eta)
        index = steps.index_of(torch.as_tensor(timestep).expand(len(sample)))
        mean, std = steps.gaussian(model_output, sample, index)
        if prev_sample is None:
            prev_sample = gaussian_sample(mean, std, generator).to(sample.dtype)
        return DDPOSchedulerOutput(prev_sample, gaussian_logprob(prev_sample, mean, std))

    @property
    def autocast(self) -> type[AbstractContextManager[None]]:
        """A context for forward passes that does nothing. Not for replacing: trainers use their accelerator's."""
        return nullcontext

    def reference(self) -> AbstractContextManager[nn.Module]:
        """Returns a context manager that gives the denoiser with its adapters off: the reference of new adapters."""
        return without_lora(self.denoiser)

    def get_trainable_layers(self) -> nn.Module | Iterable[nn.Module | nn.Parameter]:
        """Returns what trains, those of its weights that require gradients: the denoiser.

        A subclass may return a part of the denoiser, or a list of parts or weights: a trainer freezes the rest.
        """
        return self.denoiser

    def set_progress_bar_config(self, **kwargs: Any) -> None:
        """Passes the settings to the diffusers pipeline."""
        self.sd_pipeline.set_progress_bar_config(**kwargs)

    def save_pretrained(self, output_dir: str | Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Writes the adapters for `load_lora_weights`, or without adapters the whole pipeline for `from_pretrained`.

        Args:
            output_dir: an existing or new folder.
            weights: all of the denoiser's by name, where it is divided over processes; None: its own.
        """
        if self.use_lora:
            save_lora(self.sd_pipeline, output_dir, weights)
        elif weights is None:
            self.sd_pipeline.save_pretrained(output_dir)
        else:
            divided, whole = self.denoiser, self.kind.from_config(self.denoiser.config)
            whole.load_state_dict(weights, assign=True)
            setattr(self.sd_pipeline, self.name, whole)
            try:
                self.sd_pipeline.save_pretrained(output_dir)
            finally:
                setattr(self.sd_pipeline, self.name, divided)


class DefaultDDPOStableDiffusionPipeline(DDPOStableDiffusionPipeline):
    """A pipeline loaded from a folder or the hub, with the adapters stored there.

    A folder of adapters alone, such as `DDPOTrainer.save_pretrained` writes, is loaded with the pipeline that they were
    trained on. Stored adapters are trained on, also with `use_lora=False`.

    Args:
        pretrained_model_name: folder or hub id.
        pretrained_model_revision: branch, tag or commit on the hub.
        use_lora: see `DDPOStableDiffusionPipeline`.
        lora_rank: see `DDPOStableDiffusionPipeline`.
        load_kwargs: more arguments of `DiffusionPipeline.from_pretrained`, such as torch_dtype.
        call_kwargs: see `DDPOStableDiffusionPipeline`.
    """

    def __init__(
        self,
        pretrained_model_name: str,
        *,
        pretrained_model_revision: str = "main",
        use_lora: bool = True,
        lora_rank: int = 4,
        load_kwargs: Mapping[str, Any] | None = None,
        call_kwargs: Mapping[str, Any] | None = None,
    ):
        self.pretrained_model, self.pretrained_revision = pretrained_model_name, pretrained_model_revision
        kwargs, place = dict(load_kwargs or {}), {"revision": pretrained_model_revision}
        hub = place | {name: kwargs[name] for name in ("cache_dir", "token", "local_files_only") if name in kwargs}
        adapters, base = stored_file(pretrained_model_name, LORA_FILE, **hub), pretrained_model_name
        if adapters is not None and stored_file(pretrained_model_name, "model_index.json", **hub) is None:
            base, place = base_of_lora(adapters), {}
        pipeline = DiffusionPipeline.from_pretrained(base, **place, **kwargs)
        if adapters is not None:
            pipeline.load_lora_weights(adapters.parent, weight_name=LORA_FILE)
            use_lora = True
        super().__init__(pipeline, use_lora=use_lora, lora_rank=lora_rank, call_kwargs=call_kwargs)


def trainable_scheduler(scheduler: Any) -> Scheduler:
    """Returns a scheduler whose steps have log-probabilities.

    DDIM and flow-matching Euler are returned unchanged. With a warning, other schedulers with products of alphas become
    DDIM, whose steps with eta=1 are DDPM's, and others that follow a flow become flow-matching Euler.

    Raises:
        ValueError: the scheduler is of another kind.
    """
    config, kind = scheduler.config, type(scheduler).__name__
    is_a_flow = config.get("use_flow_sigmas") or "FlowMatch" in kind
    if type(scheduler) is DDIMScheduler or (
        type(scheduler) is FlowMatchEulerDiscreteScheduler and not config.stochastic_sampling
    ):
        return cast(Scheduler, scheduler)
    if is_a_flow:
        shift = config.get("shift", config.get("flow_shift", 1.0))
        replacement = _with_settings(FlowMatchEulerDiscreteScheduler, config, shift=shift, stochastic_sampling=False)
    elif "beta_schedule" in config:
        clips = config.get("clip_sample", False)  # by default DDIM would clip latents as if they were images
        ends = config.get("set_alpha_to_one", config.get("final_sigmas_type") != "sigma_min")
        replacement = _with_settings(DDIMScheduler, config, clip_sample=clips, set_alpha_to_one=ends)
    else:
        raise ValueError(
            f"{kind} has no log-probabilities, and its settings have neither betas nor a flow for another scheduler. "
            "Set pipeline.scheduler to a DDIMScheduler or a FlowMatchEulerDiscreteScheduler."
        )
    warnings.warn(
        f"The steps of {kind} have no log-probability: {type(replacement).__name__} with its settings takes its place. "
        "Sample with it after training too.",
        stacklevel=4,
    )
    return replacement


def _with_settings(kind: Any, config: Mapping[str, Any], **settings: Any) -> Any:
    """Returns a scheduler with all settings that it shares with another's config.

    `from_config` alone drops settings that were never set, even where the defaults of the two kinds differ.
    """
    known = {name: config[name] for name in inspect.signature(kind).parameters if name in config}
    return kind.from_config(config, **known | settings)
