"""Low-rank adapters on a denoiser: trained in float32, saved in diffusers' format."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from diffusers.loaders import PeftAdapterMixin
from diffusers.training_utils import cast_training_params
from diffusers.utils import convert_state_dict_to_diffusers
from huggingface_hub import ModelCard, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from peft import LoraConfig, get_peft_model_state_dict
from safetensors import safe_open
from torch import Tensor, nn

from trimtab_diffusion.recorder import denoiser_name

LORA_FILE = "pytorch_lora_weights.safetensors"
ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")


def add_lora(denoiser: PeftAdapterMixin, *, rank: int) -> None:
    """Freezes a denoiser and adds adapters to its attention, or trains the adapters that it has.

    New adapters start as zero maps (Hu et al. 2021, arXiv:2106.09685). All are trained in float32.

    Args:
        denoiser: the unet or transformer.
        rank: the rank of new adapters.

    Raises:
        ValueError: several adapters are active.
    """
    module = cast(nn.Module, denoiser).requires_grad_(False)
    if has_adapters(denoiser):
        active = denoiser.active_adapters()
        if len(active) != 1:
            raise ValueError(
                f"The adapters {', '.join(active)} are active: only one can be trained and saved. Choose it with "
                "pipeline.set_adapters. To keep the others in the weights, call pipeline.fuse_lora before."
            )
        for name, weight in module.named_parameters():
            weight.requires_grad_("lora_" in name and f".{active[0]}." in name)
    else:
        config = LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=list(ATTENTION))
        denoiser.add_adapter(config)
    cast_training_params(module, dtype=torch.float32)


@contextmanager
def without_lora(denoiser: PeftAdapterMixin) -> Iterator[nn.Module]:
    """Switches the adapters of a denoiser off inside the block, which gets the denoiser; the same weights train after.

    PEFT lets all weights of the active adapter train when it switches them on again.
    """
    module = cast(nn.Module, denoiser)
    trains = {name: weight.requires_grad for name, weight in module.named_parameters()}
    denoiser.disable_adapters()
    try:
        yield module
    finally:
        denoiser.enable_adapters()
        for name, weight in module.named_parameters():
            weight.requires_grad_(trains[name])


def save_lora(pipeline: Any, folder: str | Path, denoiser_weights: Mapping[str, Tensor] | None = None) -> None:
    """Writes the adapters of a pipeline, in the format that `pipeline.load_lora_weights(folder)` reads.

    Args:
        pipeline: its denoiser's adapters are written, and those of its text encoders, which are not trained.
        folder: an existing or new folder.
        denoiser_weights: all of the denoiser's by name, where it is divided over processes; None: its own.
    """
    layers: dict[str, Any] = {}
    for name in (denoiser_name(pipeline), "text_encoder", "text_encoder_2"):
        part = pipeline.components.get(name)
        if has_adapters(part):
            adapter = part.active_adapters()[0]
            full = denoiser_weights if name == denoiser_name(pipeline) else None
            weights = get_peft_model_state_dict(part, state_dict=full, adapter_name=adapter)
            layers[f"{name}_lora_layers"] = convert_state_dict_to_diffusers(weights)
            base = {"base_model_name_or_path": base_name(pipeline)}
            layers[f"{name}_lora_adapter_metadata"] = part.peft_config[adapter].to_dict() | base
    pipeline.save_lora_weights(folder, **layers)


def base_name(pipeline: Any) -> str | None:
    """Returns the hub id or folder that a pipeline was loaded from; None for one that was built in code."""
    return pipeline.name_or_path or None


def stored_file(source: str, name: str, **hub: Any) -> Path | None:
    """Returns a file of a folder or of a hub repository; None if it does not exist.

    Args:
        source: the folder, or the hub id.
        name: the file's name.
        hub: options of `hf_hub_download`.
    """
    if Path(source).is_dir():
        return Path(source, name) if Path(source, name).is_file() else None
    try:
        return Path(hf_hub_download(source, name, **hub))
    except (EntryNotFoundError, HFValidationError):  # an entry is not found either where there is no network
        return None


def base_of_lora(file: Path) -> str:
    """Returns the pipeline that stored adapters were trained on, from their metadata or their model card.

    Raises:
        ValueError: neither names it.
    """
    with safe_open(file, "pt") as weights:
        metadata = json.loads((weights.metadata() or {}).get("lora_adapter_metadata", "{}"))
    named = [value for key, value in metadata.items() if key.endswith("base_model_name_or_path") and value]
    card = file.with_name("README.md")
    if not named and card.is_file():
        named = [ModelCard.load(card).data.get("base_model")]
    if not named or not isinstance(named[0], str):
        raise ValueError(
            f"{file.parent} holds adapters without a pipeline, and names no base model. Load the base with "
            "DiffusionPipeline.from_pretrained, then pipeline.load_lora_weights(folder), and pass "
            "DDPOStableDiffusionPipeline(pipeline, use_lora=True)."
        )
    return named[0]


def has_adapters(part: object) -> bool:
    """Whether a part of a pipeline has adapters; PEFT sets the attribute with the first."""
    return bool(getattr(part, "peft_config", None))
