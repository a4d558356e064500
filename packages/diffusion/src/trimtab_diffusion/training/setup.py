"""The parts of a run, as its config asks for them."""

import copy
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, convert_to_fp32
from torch import nn

from trimtab_common.accelerate_trackers import trackers_of
from trimtab_common.accelerators import WeighingAccelerator, create_accelerator
from trimtab_common.config import to_flat_dict
from trimtab_common.health import HealthMonitor
from trimtab_common.overrides import replaced
from trimtab_common.run import Run
from trimtab_common.run_record import RunRecord
from trimtab_common.sharding import divides_weights, prepared_for_inference, tell_deepspeed_of_batches
from trimtab_common.tracking import start_tracking
from trimtab_diffusion.pipelines import DDPOStableDiffusionPipeline

from .config import PipelineConfig

Reference = Callable[[], AbstractContextManager[nn.Module]]
"""A context that gives the denoiser as it was before training."""
DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def accelerator_of(config: PipelineConfig) -> WeighingAccelerator:
    """The accelerator that the config asks for. Collective.

    Without a GPU fp16 becomes float32, with a warning.

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
    accelerator = create_accelerator(config.accelerator_kwargs, config.project_kwargs, mixed_precision=precision)
    max_grad_norm = config.train_max_grad_norm
    tell_deepspeed_of_batches(accelerator, size=config.train_batch_size, max_grad_norm=max_grad_norm)
    return accelerator


def place(config: PipelineConfig, pipeline: DDPOStableDiffusionPipeline, accelerator: Accelerator) -> None:
    """Moves a pipeline to the accelerator: frozen weights in its precision, those that train in float32 at least.

    Without mixed precision half-precision parts become float32 if the whole denoiser trains; beside adapters they stay.
    """
    dtype, denoiser = DTYPES[accelerator.mixed_precision], pipeline.denoiser
    pipeline.set_progress_bar_config(disable=True)
    if config.train_gradient_checkpointing:
        denoiser.enable_gradient_checkpointing()
    if config.train_channels_last:
        to_channels_last(denoiser)
    if config.train_compile:
        compile_blocks(denoiser, config.train_compile)
    for part in pipeline.sd_pipeline.components.values():
        if not isinstance(part, nn.Module):
            continue
        if dtype == torch.float32 and not pipeline.use_lora:
            to_float32(part)
        if part is not denoiser:
            part.to(accelerator.device, dtype if dtype != torch.float32 else None)
            continue
        if not accelerator.is_fsdp2:  # which moves this process's part alone
            denoiser.to(accelerator.device)
        for weight in denoiser.parameters():
            if weight.requires_grad:
                weight.data = weight.data if weight.dtype == torch.float64 else weight.data.float()
            elif dtype != torch.float32:
                weight.data = weight.data.to(dtype)


def to_float32(module: nn.Module) -> None:
    """Casts half-precision weights and buffers to float32."""
    for tensor in chain(module.parameters(), module.buffers()):
        if tensor.dtype in (torch.float16, torch.bfloat16):
            tensor.data = tensor.data.float()


def to_channels_last(denoiser: nn.Module) -> None:
    """Stores the weights of convolutions with the channels last, which their outputs follow.

    Raises:
        ValueError: the denoiser has no convolution in two or three dimensions.
    """
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    kernels = [weight for weight in denoiser.parameters() if weight.dim() in formats]
    if not kernels:
        raise ValueError(
            f"train_channels_last=True concerns convolutions, and {type(denoiser).__name__} has none. Set it to False."
        )
    for weight in kernels:
        weight.data = weight.data.contiguous(memory_format=formats[weight.dim()])


def compile_blocks(denoiser: Any, backend: str) -> None:
    """Compiles the blocks that a denoiser repeats, each by itself: one compilation serves all of a kind.

    Raises:
        ValueError: diffusers names no such blocks, and the denoiser has no list of them.
    """
    try:
        denoiser.compile_repeated_blocks(backend=backend)
    except ValueError as error:
        blocks = [block for part in denoiser.children() if isinstance(part, nn.ModuleList) for block in part]
        if not blocks:
            raise ValueError(
                f"train_compile={backend!r} compiles repeated blocks: {type(denoiser).__name__} names none. Use None."
            ) from error
        for block in blocks:
            block.compile(backend=backend)


def return_float32(denoiser: nn.Module, accelerator: Accelerator) -> None:
    """Casts what a sharded denoiser returns in mixed precision to float32, as accelerate does under other engines.

    Guidance and the schedule then compute with the same precision under every engine.
    """
    if accelerator.is_fsdp2 and accelerator.mixed_precision != "no":
        denoiser.register_forward_hook(lambda module, inputs, outputs: convert_to_fp32(outputs))


def check_saves(config: PipelineConfig, accelerator: Accelerator, epochs: int) -> None:
    """ValueError where `train` would save a checkpoint that DeepSpeed's engine keeps to itself."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED and epochs >= config.save_freq:
        raise ValueError(
            f"save_freq={config.save_freq}: DeepSpeed's engine holds weights and moments in parts, so that there are "
            f"no checkpoints to resume from. Set it above the {epochs} epochs and call save_pretrained, or train with "
            "FSDP2."
        )


def run_of(
    config: PipelineConfig,
    accelerator: Accelerator,
    model: nn.Module,
    *,
    without_effect: Collection[str],
    held: Collection[str],
    kl_target: float | None = None,
    data: str | None = None,
) -> Run:
    """The run that the config asks for. Collective.

    Args:
        config: the trainer's.
        accelerator: the trainer's.
        model: as it was prepared.
        without_effect: settings that change no result, by name or pattern.
        held: settings whose values a resumed run keeps.
        kl_target: the KL that a controller aims at.
        data: fingerprint of the dataset; None where functions give the prompts.
    """
    run = Run(
        accelerator,
        model,
        RunRecord.of(config, without=without_effect, data=data),
        health=HealthMonitor(kl_target=kl_target),
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
        held=held,
    )
    accelerator.trackers = trackers_of(run, config.log_with)
    return run


def reference_of(
    pipeline: DDPOStableDiffusionPipeline, accelerator: Accelerator, *, rests_on_cpu: bool = False
) -> Reference:
    """The denoiser as it is before training: without its new adapters, or a frozen copy.

    Beside trained adapters the copy shares the other weights with the denoiser, unless processes divide them.

    Args:
        pipeline: with the denoiser.
        accelerator: prepares the copy.
        rests_on_cpu: whether the copy is on the accelerator's device in the context alone.

    Raises:
        ValueError: it rests on the CPU, but there is no copy, or processes share its weights.
        TypeError: the pipeline's class replaces `reference`, and no new adapters train.
    """
    if rests_on_cpu and (pipeline.use_lora or divides_weights(accelerator)):
        raise ValueError(
            "precompute_ref_errors=True takes a frozen copy of the denoiser from the device. "
            + (
                "Adapters need none: the reference shares the other weights with the denoiser."
                if pipeline.use_lora
                else f"Under {accelerator.distributed_type.value} no process has a whole one."
            )
            + " Leave it out."
        )
    if pipeline.has_new_adapters:
        if pipeline.has_trained:
            warnings.warn(
                "The pipeline's adapters have trained already, and the reference is the denoiser without them, as "
                "before that training. For a reference with them, wrap the diffusers pipeline again: "
                "DDPOStableDiffusionPipeline(pipeline.sd_pipeline, use_lora=True).",
                stacklevel=3,
            )
        return pipeline.reference
    if replaced(pipeline, DDPOStableDiffusionPipeline, "reference"):
        raise TypeError(
            f"{type(pipeline).__name__} replaces reference, which is called where new adapters train alone: here the "
            "reference is a frozen copy of the denoiser. Remove it, or train new adapters."
        )
    shares = pipeline.use_lora and not divides_weights(accelerator)
    weights = pipeline.denoiser.parameters()
    shared = {id(weight): weight for weight in weights if shares and not weight.requires_grad}
    frozen = copy.deepcopy(pipeline.denoiser, shared).requires_grad_(False)
    if divides_weights(accelerator):
        prepared = prepared_for_inference(frozen, accelerator)
        return_float32(prepared, accelerator)
    else:
        prepared = accelerator.prepare_model(frozen, evaluation_mode=True)  # in the policy's precision
    return partial(on_device, prepared.cpu(), accelerator.device) if rests_on_cpu else lambda: nullcontext(prepared)


@contextmanager
def on_device(module: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """A context in which a module of the CPU is on the device."""
    try:
        yield module.to(device)
    finally:
        module.cpu()
