"""The parts of DDPOTrainer that other trainers of pipelines have not."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from accelerate import Accelerator
from torch import nn

from trimtab_common.sharding import divides_weights, prepared_for_inference
from trimtab_diffusion.pipelines import DDPOStableDiffusionPipeline
from trimtab_diffusion.prompt_stats import PerPromptStatTracker
from trimtab_diffusion.training.setup import return_float32

from .config import DDPOConfig

Reference = Callable[[], AbstractContextManager[nn.Module]]
"""A context that gives the denoiser as it was before training."""


def reference_of(
    config: DDPOConfig, pipeline: DDPOStableDiffusionPipeline, accelerator: Accelerator
) -> Reference | None:
    """What the KL penalty is against: the denoiser without its adapters, or a frozen copy; None without a penalty."""
    if not config.init_kl_coef:
        return None
    if pipeline.use_lora:
        return pipeline.reference
    frozen = copy.deepcopy(pipeline.denoiser).requires_grad_(False)
    if divides_weights(accelerator):
        prepared = prepared_for_inference(frozen, accelerator)
        return_float32(prepared, accelerator)
    else:
        prepared = accelerator.prepare_model(frozen, evaluation_mode=True)  # in the policy's precision
    return lambda: nullcontext(prepared)


def prompt_stats_of(config: DDPOConfig) -> PerPromptStatTracker | None:
    """The statistics of each prompt's rewards, if the config asks for them."""
    if not config.per_prompt_stat_tracking:
        return None
    return PerPromptStatTracker(config.per_prompt_stat_tracking_buffer_size, config.per_prompt_stat_tracking_min_count)
