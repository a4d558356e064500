"""Low-rank adapters on a denoiser: trained in float32 whatever its own weights are, saved as diffusers loads them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.training_utils import cast_training_params
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig, get_peft_model_state_dict

from trimtab_diffusion.recording import denoiser_name

ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")


def add_lora(denoiser: Any, *, rank: int) -> None:
    """Freeze a denoiser and give it adapters on its attention, or go on with those that it has.

    The adapters start as zero maps (Hu et al. 2021, arXiv:2106.09685) and are float32.
    """
    denoiser.requires_grad_(False)
    if getattr(denoiser, "peft_config", None):
        for name, weight in denoiser.named_parameters():
            weight.requires_grad_("lora_" in name)
    else:
        config = LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=list(ATTENTION))
        denoiser.add_adapter(config)
    cast_training_params(denoiser, dtype=torch.float32)


@contextmanager
def without_lora(denoiser: Any) -> Iterator[None]:
    """The frozen denoiser, as it was before its adapters."""
    denoiser.disable_adapters()
    try:
        yield
    finally:
        denoiser.enable_adapters()


def save_lora(pipeline: DiffusionPipeline, folder: str | Path) -> None:
    """Write the adapters of a pipeline's denoiser so that `pipeline.load_lora_weights(folder)` gives them back."""
    name = denoiser_name(pipeline)
    denoiser: Any = getattr(pipeline, name)
    adapter = denoiser.active_adapters()[0]
    weights = convert_state_dict_to_diffusers(get_peft_model_state_dict(denoiser, adapter_name=adapter))
    settings = denoiser.peft_config[adapter].to_dict()
    parts: dict[str, Any] = {f"{name}_lora_layers": weights, f"{name}_lora_adapter_metadata": settings}
    pipeline.save_lora_weights(folder, **parts)  # type: ignore[attr-defined]
