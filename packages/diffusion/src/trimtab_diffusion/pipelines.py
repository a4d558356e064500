"""What DDPOTrainer trains: any diffusers pipeline whose denoiser is called once a step, under the documented names."""

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import DDIMScheduler, DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from trimtab_diffusion.lora import add_lora, save_lora, without_lora
from trimtab_diffusion.recording import Trajectories, denoiser_name, record
from trimtab_diffusion.steps import Steps, gaussian_sample

# What a denoiser was trained on, and so must survive a change of the scheduler.
SCHEDULE = (
    "num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "steps_offset",
    "prediction_type", "rescale_betas_zero_snr",
)  # fmt: skip


@dataclass
class DDPOPipelineOutput:
    """What a pipeline drew, and how.

    images: as the pipeline gives them, [B, 3, H, W] within [0, 1] for output_type="pt". latents: T + 1 tensors
    [B, ...], noise first. log_probs: T tensors [B], per dimension. trajectories: the same, with what replays them.
    """

    images: Any
    latents: list[Tensor]
    log_probs: list[Tensor]
    trajectories: Trajectories = field(repr=False)


@dataclass
class DDPOSchedulerOutput:
    """latents: [B, ...] after a step. log_probs: [B], of having stepped there, per dimension, in nats."""

    latents: Tensor
    log_probs: Tensor


class DDPOStableDiffusionPipeline:
    """A diffusers pipeline made ready for DDPO: its denoiser trains, all else is frozen.

    pipeline: Stable Diffusion 1.x or 2.x, SDXL, SD3-type flow matching, ControlNet, or another whose denoiser (unet or
    transformer) is called once a step. use_lora: train adapters of rank `lora_rank`, or those that it has already
    (`pipeline.load_lora_weights`), instead of all weights. call_kwargs: more arguments of every call of the pipeline,
    such as height and width, or the image of a ControlNet. A scheduler whose steps have no log-probability is replaced,
    with a warning, and a safety checker switched off, since it would hand black pictures to the reward.
    """

    def __init__(
        self,
        pipeline: Any,
        *,
        use_lora: bool = False,
        lora_rank: int = 4,
        call_kwargs: Mapping[str, Any] | None = None,
    ):
        self.sd_pipeline = pipeline
        self.call_kwargs = dict(call_kwargs or {})
        self.use_lora = use_lora
        self.name = denoiser_name(pipeline)
        self.sd_pipeline.scheduler = trainable_scheduler(self.sd_pipeline.scheduler)
        if getattr(self.sd_pipeline, "safety_checker", None) is not None:
            warnings.warn("The safety checker is off: it blackens pictures before the reward sees them.", stacklevel=2)
            self.sd_pipeline.safety_checker = None
        for part in self.sd_pipeline.components.values():
            if isinstance(part, nn.Module):
                part.requires_grad_(False).eval()
        if use_lora:
            add_lora(self.denoiser, rank=lora_rank)
        else:
            self.denoiser.requires_grad_(True)

    @property
    def denoiser(self) -> Any:
        """The unet or transformer."""
        return getattr(self.sd_pipeline, self.name)

    @property
    def unet(self) -> Any:
        return self.denoiser

    @property
    def vae(self) -> Any:
        return self.sd_pipeline.vae

    @property
    def tokenizer(self) -> Any:
        return self.sd_pipeline.tokenizer

    @property
    def text_encoder(self) -> Any:
        return self.sd_pipeline.text_encoder

    @property
    def scheduler(self) -> Any:
        return self.sd_pipeline.scheduler

    @property
    def device(self) -> torch.device:
        return self.sd_pipeline.device

    @torch.no_grad()
    def __call__(
        self,
        *args: Any,
        eta: float = 1.0,
        storage_dtype: torch.dtype | None = None,
        storage_device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> DDPOPipelineOutput:
        """Draw with the pipeline, whose arguments these are, and record it: see `recording.record`."""
        if args:
            kwargs = {"prompt": args[0], **kwargs}
        images, made = record(
            self.sd_pipeline, eta=eta, storage_dtype=storage_dtype, storage_device=storage_device,
            **{**self.call_kwargs, **kwargs},
        )  # fmt: skip
        return DDPOPipelineOutput(images, [made.first, *made.latents.unbind(1)], list(made.logprobs.unbind(1)), made)

    def scheduler_step(
        self,
        model_output: Tensor,
        timestep: Any,
        sample: Tensor,
        eta: float = 1.0,
        generator: torch.Generator | None = None,
        prev_sample: Tensor | None = None,
    ) -> DDPOSchedulerOutput:
        """One step from `sample` [B, ...] at `timestep` (one, or [B]); with `prev_sample`, the score of that one."""
        steps = Steps.of(self.scheduler, eta)
        index = steps.index_of(torch.as_tensor(timestep).expand(len(sample)))
        mean, std = steps.gaussian(model_output, sample, index)
        if prev_sample is None:
            prev_sample = gaussian_sample(mean, std, generator).to(sample.dtype)
        return DDPOSchedulerOutput(prev_sample, steps.logprob(model_output, sample, prev_sample, index))

    @property
    def autocast(self) -> type[AbstractContextManager[None]]:
        """A context for forward passes: the trainer's accelerator brings its own."""
        return nullcontext

    def reference(self) -> AbstractContextManager[None]:
        """Within it the denoiser is as it was before its adapters."""
        return without_lora(self.denoiser)

    def get_trainable_layers(self) -> nn.Module:
        """The denoiser, in which what trains has requires_grad."""
        return self.denoiser

    def set_progress_bar_config(self, **kwargs: Any) -> None:
        """As of the diffusers pipeline."""
        self.sd_pipeline.set_progress_bar_config(**kwargs)

    def save_pretrained(self, output_dir: str | Path) -> None:
        """The adapters, for `load_lora_weights`; or the whole pipeline, for `from_pretrained`."""
        if self.use_lora:
            save_lora(self.sd_pipeline, output_dir)
        else:
            self.sd_pipeline.save_pretrained(output_dir)


class DefaultDDPOStableDiffusionPipeline(DDPOStableDiffusionPipeline):
    """The pipeline of a folder or hub id: see `DDPOStableDiffusionPipeline`.

    load_kwargs: more arguments of `DiffusionPipeline.from_pretrained`, such as torch_dtype.
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
        pipeline = DiffusionPipeline.from_pretrained(
            pretrained_model_name, revision=pretrained_model_revision, **(load_kwargs or {})
        )
        super().__init__(pipeline, use_lora=use_lora, lora_rank=lora_rank, call_kwargs=call_kwargs)


def trainable_scheduler(scheduler: Any) -> Any:
    """The scheduler, or what takes its place with a warning because its steps have no log-probability.

    DDIM and flow-matching Euler stay. Others with products of alphas become DDIM, whose steps with eta=1 are DDPM's;
    others along a flow become flow-matching Euler. ValueError for the rest.
    """
    config, kind = scheduler.config, type(scheduler).__name__
    is_a_flow = config.get("use_flow_sigmas") or "FlowMatch" in kind
    if type(scheduler) is DDIMScheduler or (
        type(scheduler) is FlowMatchEulerDiscreteScheduler and not config.stochastic_sampling
    ):
        return scheduler
    if is_a_flow:
        shift = config.get("shift", config.get("flow_shift", 1.0))
        made = FlowMatchEulerDiscreteScheduler.from_config(config, shift=shift, stochastic_sampling=False)
    elif "beta_schedule" in config:
        # from_config drops what was never set, even where the two kinds' defaults differ; and without clip_sample DDIM
        # would clip latents as if they were pictures.
        schedule = {name: config[name] for name in SCHEDULE if name in config}
        made = DDIMScheduler.from_config(config, clip_sample=config.get("clip_sample", False), **schedule)
    else:
        raise ValueError(
            f"{kind} has no log-probabilities, and its settings name neither betas nor a flow from which another could "
            "be made. Set pipeline.scheduler to a DDIMScheduler or a FlowMatchEulerDiscreteScheduler."
        )
    warnings.warn(
        f"The steps of {kind} have no log-probability: {type(made).__name__} with its settings takes its place.",
        stacklevel=4,
    )
    return made
