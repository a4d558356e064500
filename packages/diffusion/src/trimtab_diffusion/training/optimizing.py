"""The optimizer, and its steps in an epoch, on any engine of the accelerator."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn

from trimtab_common.accelerators import WeighingAccelerator, fused_if_possible
from trimtab_common.health import TrainingDivergedError
from trimtab_common.stats import Stats
from trimtab_diffusion.lora import has_adapters
from trimtab_diffusion.pipelines import DDPOStableDiffusionPipeline

from .config import PipelineConfig


def optimizer_of(config: PipelineConfig, pipeline: DDPOStableDiffusionPipeline) -> torch.optim.Optimizer:
    """AdamW over the trained weights, with 8-bit moments if asked for; freezes the denoiser's other weights."""
    trainable = trained_weights(pipeline)
    pipeline.denoiser.requires_grad_(False)
    for weight in trainable:
        weight.requires_grad_(True)
    kind: Any = partial(torch.optim.AdamW, fused=fused_if_possible(trainable))
    if config.train_use_8bit_adam:
        try:
            from bitsandbytes.optim import AdamW8bit
        except ImportError as error:
            raise ImportError("train_use_8bit_adam needs the package bitsandbytes: pip install bitsandbytes") from error
        kind = AdamW8bit
    return kind(
        trainable,
        lr=config.train_learning_rate,
        betas=(config.train_adam_beta1, config.train_adam_beta2),
        weight_decay=config.train_adam_weight_decay,
        eps=config.train_adam_epsilon,
    )


def trained_weights(pipeline: DDPOStableDiffusionPipeline) -> list[nn.Parameter]:
    """The weights of `get_trainable_layers` that require gradients.

    Raises:
        ValueError: there are none, or some are not the denoiser's, or it added adapters.
    """
    layers = pipeline.get_trainable_layers()
    parts = [layers] if isinstance(layers, nn.Module) else layers
    weights = chain.from_iterable(part.parameters() if isinstance(part, nn.Module) else [part] for part in parts)
    if has_adapters(pipeline.denoiser) and not pipeline.use_lora:
        raise ValueError(
            "get_trainable_layers added adapters to a pipeline with use_lora=False, which could not be loaded after "
            "training. Add them before, by pipeline.unet.add_adapter(...), and pass "
            "DDPOStableDiffusionPipeline(pipeline, use_lora=True)."
        )
    wanted = {id(weight) for weight in weights if weight.requires_grad}
    trained = [weight for weight in pipeline.denoiser.parameters() if id(weight) in wanted]
    if not wanted or len(trained) < len(wanted):
        raise ValueError(
            f"get_trainable_layers returned {len(wanted)} weights that require gradients; {len(trained)} of them are "
            "the denoiser's. Return the denoiser or layers of it, with at least one such weight."
        )
    return trained


def warmup(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """A learning rate that rises from 1/steps of its value to its full value over the first `steps` updates."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / max(1, steps)))


@dataclass
class Updates:
    """Takes optimizer steps of several parts each, on any engine of the accelerator.

    Args:
        accelerator: weighs the parts and exchanges their gradients.
        model: as it was prepared.
        optimizer: updates its weights.
        lr_scheduler: moves with each step.
        config: the largest norm of a gradient.
        done: optimizer steps before these.

    Attributes:
        losses: those of the step's parts that were not checked yet.
        learning_rate: the rate of the last step.
    """

    accelerator: WeighingAccelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler
    config: PipelineConfig
    done: int
    losses: list[Tensor] = field(default_factory=list, init=False)
    learning_rate: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.model.zero_grad()  # of a step that an error has ended

    def parts(self, chunks: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yields the chunks that make a step; gradients are exchanged with the last."""
        for number, chunk in enumerate(chunks, start=1):
            with self.accelerator.part_of_step(self.model, is_last=number == len(chunks)):
                yield chunk

    def backward(self, loss: Tensor, share: float) -> None:
        """Adds the gradient of a part's loss, which is `share` of the step's."""
        self.losses.append(loss.detach().float())
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:  # takes the step with the last gradient
            self._require_finite()
        self.accelerator.backward(loss * share)

    def step(self) -> Stats:
        """Clips the gradient and changes the weights; returns the statistics of the norm before.

        Raises:
            TrainingDivergedError: a part's loss is not finite, or the norm where no loss scale is there to skip the
                update.
        """
        accelerator, largest = self.accelerator, self.config.train_max_grad_norm
        norm = accelerator.clip_grad_norm_(self.model.parameters(), largest)
        self._require_finite(*[norm.float()] * (accelerator.scaler is None))
        self.learning_rate = float(self.optimizer.param_groups[0]["lr"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.lr_scheduler.step()
        self.done += 1
        return accelerator.norm_stats(norm)

    def _require_finite(self, *norm: Tensor) -> None:
        """Checks the losses since the last time, and the norm; waits for the device once."""
        numbers, count, self.losses = [*self.losses, *norm], len(self.losses), []
        for number, value in enumerate(torch.stack(numbers).tolist() if numbers else []):
            if not math.isfinite(value):
                self.optimizer.zero_grad()
                name = "loss" if number < count else "gradient's norm"
                raise TrainingDivergedError(
                    f"The {name} is {value} at update {self.done}. No update was made. Lower "
                    f"train_learning_rate ({self.config.train_learning_rate}), or train in bf16 or float32."
                )
