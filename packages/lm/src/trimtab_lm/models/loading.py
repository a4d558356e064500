"""Loads models, and adapters with their base models."""

import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from peft import PeftConfig, PeftModel, load_peft_weights, prepare_model_for_kbit_training
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BitsAndBytesConfig, PreTrainedModel
from transformers.utils import find_adapter_config_file

from trimtab_common.config import without_secrets
from trimtab_lm.interface import Model

AutoModel: TypeAlias = type[AutoModelForCausalLM] | type[AutoModelForSeq2SeqLM]
"""A class of transformers that chooses the model's class by its configuration."""

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""Arguments of `from_pretrained` that say where the files are and how to get them."""

CHOOSES_DTYPE = ("dtype", "torch_dtype", "quantization_config", "load_in_8bit", "load_in_4bit")
"""Arguments of `from_pretrained` that say in which type the weights are stored."""


def load_model(
    kind: AutoModel,
    source: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_trainable: bool,
    hub: dict[str, Any],
    peft_config: PeftConfig | None = None,
    **kbit: Any,
) -> Model:
    """Loads the model in `source`, or the adapter in it on the base model that the adapter names.

    Args:
        kind: the transformers class that loads it.
        args, kwargs: arguments of `kind.from_pretrained`.
        is_trainable: whether a loaded adapter can train.
        hub: the part of kwargs that concerns the download, for the adapter.
        peft_config: the adapter that the caller will put on the model.
        kbit: see `prepared_for_adapter`.

    Raises:
        ValueError: the adapter names no base model.
    """
    adapter_file = find_adapter_config_file(source, **hub)
    if adapter_file is None:
        return from_pretrained(kind, source, *args, only_adapters=trains_only_adapters(peft_config), **kwargs)
    adapter = json.loads(Path(adapter_file).read_text(encoding="utf-8"))
    if not adapter.get("base_model_name_or_path"):
        raise ValueError(
            f"{adapter_file} names no base model. Load the base model, put the adapter on it with "
            "PeftModel.from_pretrained(base, folder, is_trainable=True) and pass the result."
        )
    # revision and subfolder locate the adapter; the adapter's config locates the base model.
    kwargs = {name: value for name, value in kwargs.items() if name not in ("revision", "subfolder")}
    base_name, revision = adapter["base_model_name_or_path"], adapter.get("revision")
    only_adapters = not adapter.get("modules_to_save")
    base = from_pretrained(kind, base_name, *args, only_adapters=only_adapters, revision=revision, **kwargs)
    base = prepared_for_adapter(base, **kbit) if is_trainable else base
    return PeftModel.from_pretrained(base, source, is_trainable=is_trainable, **hub)


def labels_of_head(source: str, adapter: PeftConfig) -> dict[str, int]:
    """Returns `num_labels` of the head that is saved with an adapter, for its base model; nothing without a head."""
    parts = {"score", "classifier", *(getattr(adapter, "modules_to_save", None) or ())}
    saved = load_peft_weights(source, device="cpu").items()
    weights = [weight for place, weight in saved if parts & set(place.split(".")) and "lora_" not in place]
    rows = [len(weight) for weight in weights if weight.dim() == 2]
    return {"num_labels": min(rows)} if rows else {}  # a head of two layers: the last has as many rows as labels


def from_pretrained(kind: Any, source: str, *args: object, only_adapters: bool = False, **kwargs: Any) -> Any:
    """Calls `kind.from_pretrained`; warns and leaves FlashAttention out where its package or a GPU is missing.

    The weights are float32 unless kwargs choose a type, because small updates round away in half precision.

    Args:
        only_adapters: whether nothing but adapters trains, which PEFT makes float32. The weights then keep the
            checkpoint's type.
    """
    if not (only_adapters or any(kwargs.get(name) for name in CHOOSES_DTYPE)):
        kwargs["dtype"] = torch.float32
    try:
        return kind.from_pretrained(source, *args, **kwargs)
    except ImportError as missing:
        attention = kwargs.pop("attn_implementation", None)
        if not str(attention).startswith("flash_attention"):
            raise
        warnings.warn(f"The model loads without attn_implementation={attention!r}: {missing}", stacklevel=4)
        return kind.from_pretrained(source, *args, **kwargs)


def tokenizer_options(init_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the arguments of a model's `from_pretrained` that its tokenizer and its configuration take, too."""
    shared = (*HUB_OPTIONS, "trust_remote_code", "code_revision")
    return {name: value for name, value in (init_kwargs or {}).items() if name in shared}


def refuse_init_kwargs(init_kwargs: Mapping[str, Any] | None) -> None:
    """Raises ValueError if there are arguments of `from_pretrained` for a model that is loaded."""
    if init_kwargs:
        raise ValueError(
            f"model_init_kwargs={without_secrets(init_kwargs)} say how to load a model, and the model is loaded "
            "already. Pass its name, or leave model_init_kwargs out."
        )


def refuse_adapter(name: str, init_kwargs: Mapping[str, Any] | None) -> None:
    """Raises ValueError if a hub id or folder is one of an adapter; init_kwargs: see `tokenizer_options`."""
    hub = {option: value for option, value in (init_kwargs or {}).items() if option in HUB_OPTIONS}
    if find_adapter_config_file(name, **hub) is not None:
        raise ValueError(
            f"{name} holds an adapter, and the name of a whole model is needed. Merge it: trimtab merge {name} "
            f"NEW_FOLDER. Or load it with its base model, AutoPeftModelForCausalLM.from_pretrained({name!r}, "
            "is_trainable=True) of peft, and pass the model and its tokenizer."
        )


def trains_only_adapters(peft_config: PeftConfig | None) -> bool:
    """Whether a model that gets these adapters trains nothing else, such as whole modules or biases."""
    others = getattr(peft_config, "modules_to_save", None) or getattr(peft_config, "bias", "none") != "none"
    return peft_config is not None and not others


def check_precision(model: nn.Module, accelerator: Accelerator) -> None:
    """Warns if trained weights are in half precision.

    DeepSpeed keeps float32 copies of such weights, and FSDP makes them float32 if it computes in mixed precision.

    Raises:
        ValueError: they are float16 and so is the arithmetic: torch cannot unscale float16 gradients.
    """
    precision, engine = accelerator.mixed_precision, accelerator.distributed_type
    if engine == DistributedType.DEEPSPEED or (engine == DistributedType.FSDP and precision != "no"):
        return
    trained = {name: weight.dtype for name, weight in model.named_parameters() if weight.requires_grad}
    halves = {name: dtype for name, dtype in trained.items() if dtype in (torch.bfloat16, torch.float16)}
    if not halves:
        return
    name, dtype = next(iter(halves.items()))
    came = f"{len(halves)} of {len(trained)} trained weights are {str(dtype).removeprefix('torch.')}, such as {name}"
    remedy = (
        "Load the model with dtype=torch.float32. For half-precision arithmetic set bf16=True, for PPO "
        "accelerator_kwargs={'mixed_precision': 'bf16'}."
    )
    if precision == "fp16" and torch.float16 in halves.values():
        raise ValueError(f"{came}, and mixed precision in fp16 needs float32 weights to unscale gradients. {remedy}")
    warnings.warn(f"{came}: updates much smaller than a weight round away. {remedy}", stacklevel=5)


def prepared_for_adapter(model: PreTrainedModel, **kbit: Any) -> PreTrainedModel:
    """Prepares a model for an adapter: a quantized one needs float32 norms, and inputs that require gradients.

    Args:
        kbit: options of PEFT's `prepare_model_for_kbit_training`.
    """
    quantized = getattr(model.config, "quantization_config", None) is not None
    return prepare_model_for_kbit_training(model, **kbit) if quantized else model


def bar_packing(model: nn.Module) -> None:
    """Keeps the 4-bit weights of a model on a CPU in the format whose forward pass has a gradient.

    On CPUs with AVX512-BF16, bitsandbytes packs weights at the first forward pass in eval mode, and computes without
    gradient from then on, in training too: adapters in earlier layers would get no gradient.

    Raises:
        ValueError: weights under adapters that train are packed already. bitsandbytes cannot put them back exactly.
    """
    is_trained = any(weight.requires_grad for weight in model.parameters())
    for module in cast(Iterable[Any], model.modules()):
        if getattr(module, "support_avx512bf16_for_cpu", False):
            if is_trained and getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
                raise ValueError(
                    "The 4-bit model has run in eval mode on this CPU, and bitsandbytes has packed its weights: no "
                    "gradient flows through them. Load the model again, and give it to the trainer before it runs."
                )
            module.support_avx512bf16_for_cpu = False


def with_quantization_config(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Replaces the deprecated `load_in_8bit=True` and `load_in_4bit=True` by a quantization_config."""
    old = {name: kwargs[name] for name in ("load_in_8bit", "load_in_4bit") if name in kwargs}
    kwargs = {name: value for name, value in kwargs.items() if name not in old}
    if any(old.values()):
        if "quantization_config" in kwargs:
            raise ValueError(f"quantization_config and {', '.join(old)} came together. Keep quantization_config alone.")
        message = f"{', '.join(old)} is deprecated. Write quantization_config=BitsAndBytesConfig(...)."
        warnings.warn(message, FutureWarning, stacklevel=4)
        kwargs["quantization_config"] = BitsAndBytesConfig(**old)
    return kwargs
