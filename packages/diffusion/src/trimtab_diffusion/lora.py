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

    The adapters start as zero maps (Hu et al. 2021, arXiv:2106.09685) and are float32. ValueError if several
    are active.
    """
    denoiser.requires_grad_(False)
    if getattr(denoiser, "peft_config", None):
        active = denoiser.active_adapters()
        if len(active) != 1:
            raise ValueError(
                f"The adapters {', '.join(active)} are active: only one can be trained, and saved. Choose it with "
                "pipeline.set_adapters, after pipeline.fuse_lora where the others are to stay."
            )
        for name, weight in denoiser.named_parameters():
            weight.requires_grad_("lora_" in name and f".{active[0]}." in name)
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
    """Write the adapters of a pipeline's denoiser so that `pipeline.load_lora_weights(folder)` gives them back.

    Those that its text encoders were loaded with, which are not trained, go with them.
    """
    layers: dict[str, Any] = {}
    for name in (denoiser_name(pipeline), "text_encoder", "text_encoder_2"):
        part: Any = getattr(pipeline, name, None)
        if getattr(part, "peft_config", None):
            adapter = part.active_adapters()[0]
            weights = get_peft_model_state_dict(part, adapter_name=adapter)
            layers[f"{name}_lora_layers"] = convert_state_dict_to_diffusers(weights)
            layers[f"{name}_lora_adapter_metadata"] = part.peft_config[adapter].to_dict()
    pipeline.save_lora_weights(folder, **layers)  # type: ignore[attr-defined]
