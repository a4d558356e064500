"""The parts of a DDPOTrainer, as its config asks for them."""

import copy
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from trimtab_common.config import to_flat_dict
from trimtab_common.health import HealthMonitor
from trimtab_common.hub import write_model_card
from trimtab_common.run import Run, create_accelerator
from trimtab_common.runs import RunRecord, result_settings
from trimtab_common.tracking import Tracker, start_tracking
from trimtab_diffusion.pipelines import DDPOStableDiffusionPipeline
from trimtab_diffusion.prompt_stats import PerPromptStatTracker

from .config import DDPOConfig
from .objective import Reference

WITHOUT_EFFECT = (
    *("exp_name", "run_name", "log_with", "tracker_*", "project_kwargs", "logdir", "num_epochs", "save_freq"),
    *("num_checkpoint_limit", "resume_*", "max_workers", "async_reward_computation", "train_gradient_checkpointing"),
    "trajectory_on_cpu",
)
"""Fields of DDPOConfig that change no result."""
HELD = ("train_learning_rate", "train_adam_*", "init_kl_coef")
"""Fields of DDPOConfig whose values the optimizer and the KL controller bring along from a checkpoint."""
USAGE = {
    True: """from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{base}")
pipeline.load_lora_weights("{{repo_id}}")""",
    False: """from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{{repo_id}}")""",
}
DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def accelerator_of(config: DDPOConfig) -> Accelerator:
    """The accelerator that the config asks for; without a GPU fp16 becomes float32, with a warning.

    Raises:
        ValueError: if the config leaves the precision to the launcher, and the launcher's is not in `DTYPES`.
    """
    precision = config.mixed_precision
    effective = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower() if precision is None else precision
    if effective not in DTYPES:
        raise ValueError(
            f"mixed_precision=None takes the launcher's, and ACCELERATE_MIXED_PRECISION={effective!r} is none of "
            f"{', '.join(DTYPES)}. Set mixed_precision to one of them."
        )
    has_gpu = torch.accelerator.is_available() and not config.accelerator_kwargs.get("cpu")
    if effective == "fp16" and not has_gpu:
        warnings.warn("mixed_precision='fp16' needs a GPU: this run is in float32.", stacklevel=3)
        precision = "no"
    if config.allow_tf32 and has_gpu:
        torch.backends.cuda.matmul.allow_tf32 = True
    return create_accelerator(config.accelerator_kwargs, config.project_kwargs, mixed_precision=precision)


def place(pipeline: DDPOStableDiffusionPipeline, accelerator: Accelerator) -> None:
    """Move a pipeline to the accelerator: frozen weights in its precision, those that train in float32 at least."""
    dtype = DTYPES[accelerator.mixed_precision]
    denoiser = pipeline.denoiser
    for part in pipeline.sd_pipeline.components.values():
        if not isinstance(part, nn.Module):
            continue
        if part is not denoiser:
            part.to(accelerator.device, dtype if dtype != torch.float32 else None)
            continue
        denoiser.to(accelerator.device)
        for weight in denoiser.parameters():
            if weight.requires_grad:
                weight.data = weight.data if weight.dtype == torch.float64 else weight.data.float()
            elif dtype != torch.float32:
                weight.data = weight.data.to(dtype)


def optimizer_of(config: DDPOConfig, denoiser: nn.Module) -> torch.optim.Optimizer:
    """AdamW over what trains, with 8-bit moments if asked for."""
    kind: Any = torch.optim.AdamW
    if config.train_use_8bit_adam:
        try:
            from bitsandbytes.optim import AdamW8bit
        except ImportError as error:
            raise ImportError("train_use_8bit_adam needs the package bitsandbytes: pip install bitsandbytes") from error
        kind = AdamW8bit
    return kind(
        [weight for weight in denoiser.parameters() if weight.requires_grad],
        lr=config.train_learning_rate,
        betas=(config.train_adam_beta1, config.train_adam_beta2),
        weight_decay=config.train_adam_weight_decay,
        eps=config.train_adam_epsilon,
    )


def warmup(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """A learning rate that rises from 1/steps of its value to all of it over the first `steps` updates."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / max(1, steps)))


def reference_of(
    config: DDPOConfig, pipeline: DDPOStableDiffusionPipeline, accelerator: Accelerator
) -> Reference | None:
    """What the KL penalty is against: the denoiser without its adapters, or a frozen copy; None without a penalty."""
    if not config.init_kl_coef:
        return None
    if pipeline.use_lora:
        return partial(_without_adapters, pipeline)
    frozen = copy.deepcopy(pipeline.denoiser).requires_grad_(False)
    prepared = accelerator.prepare_model(frozen, evaluation_mode=True)  # in the policy's precision
    return lambda: nullcontext(prepared)


@contextmanager
def _without_adapters(pipeline: DDPOStableDiffusionPipeline) -> Iterator[nn.Module]:
    with pipeline.reference():
        yield pipeline.denoiser


def prompt_stats_of(config: DDPOConfig) -> PerPromptStatTracker | None:
    """The statistics of each prompt's rewards, if the config asks for them."""
    if not config.per_prompt_stat_tracking:
        return None
    return PerPromptStatTracker(config.per_prompt_stat_tracking_buffer_size, config.per_prompt_stat_tracking_min_count)


def run_of(config: DDPOConfig, accelerator: Accelerator, model: nn.Module) -> Run:
    """The run that the config asks for. Collective."""
    return Run(
        accelerator,
        model,
        RunRecord.new(result_settings(config, without=WITHOUT_EFFECT)),
        health=HealthMonitor(kl_target=config.target if config.adap_kl_ctrl else None),
        start_tracker=partial(
            start_tracking,
            config.log_with,
            project=config.tracker_project_name,
            config=to_flat_dict(config),
            name=config.run_name or config.exp_name,
            folder=accelerator.logging_dir or config.logdir,
            init_kwargs=config.tracker_kwargs,
        ),
        accepts_changes=config.resume_with_changes,
        held=HELD,
    )


def write_card(
    path: str,
    pipeline: DDPOStableDiffusionPipeline,
    config: DDPOConfig,
    *,
    name: str,
    trainer: str,
    repo_id: str | None,
) -> None:
    """Writes the model card of a trained pipeline; see `trimtab_common.hub.write_model_card`."""
    base = getattr(pipeline.sd_pipeline.config, "_name_or_path", None) or None
    write_model_card(
        path,
        name=name,
        trainer=trainer,
        paper="Black et al. 2023, arXiv:2305.13301",
        usage=USAGE[pipeline.use_lora].format(base=base or "<the base pipeline>"),
        library="diffusers",
        base_model=base,
        settings=to_flat_dict(config),
        repo_id=repo_id,
        tags=["text-to-image", "lora"] if pipeline.use_lora else ["text-to-image"],
    )


class HookTracker:
    """The tracker as `image_samples_hook` knows it from accelerate."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def log(self, values: Mapping[str, Any], step: int, **_: Any) -> None:
        """Logs numbers."""
        self.tracker.log(values, step)

    def log_images(self, values: Mapping[str, Any], step: int, **_: Any) -> None:
        """Logs images by caption: one [3, H, W], or a batch [n, 3, H, W] or a list, which share the caption."""
        images = [(image, caption) for caption, value in values.items() for image in _images(value)]
        self.tracker.images("hook", [image for image, _ in images], [caption for _, caption in images], step)


def _images(value: Any) -> list[Any]:
    return list(value) if getattr(value, "ndim", None) == 4 or isinstance(value, list | tuple) else [value]
