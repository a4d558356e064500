"""Models and tokenizers of the trainers on `transformers.Trainer`: by name, with adapters."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, cast

from accelerate import Accelerator
from peft import PeftConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoProcessor,
    AutoTokenizer,
    TrainingArguments,
)

from trimtab_common.config import without_secrets
from trimtab_common.sharding import keep_output_precision, on_one_device
from trimtab_lm.interface import Model, Processor, base_of
from trimtab_lm.models.loading import (
    bar_packing,
    from_pretrained,
    refuse_adapter,
    refuse_init_kwargs,
    tokenizer_options,
    trains_only_adapters,
)
from trimtab_lm.models.reference import Reference
from trimtab_lm.tokens.forward import score_tokens_in_forward

from .config import checkpointing_of


def load_language_model(
    model: Model | str | None,
    init_kwargs: Mapping[str, Any] | None,
    peft_config: PeftConfig | None,
    kind: Any = None,
    **kwargs: object,
) -> Model | None:
    """Loads a model by hub id or folder; returns a model in memory unchanged.

    Args:
        init_kwargs: arguments of `from_pretrained`, for a name only. Without dtype a model loads in float32, or where
            only adapters train in the checkpoint's type.
        peft_config: the adapters that train; None: all weights.
        kind: the class of transformers that loads the model; None: the model's configuration chooses between causal
            and encoder-decoder models.
        kwargs: arguments of `from_pretrained` where init_kwargs has no other value.

    Raises:
        ValueError: init_kwargs for a model that is loaded, or the name of an adapter.
    """
    init_kwargs = init_kwargs or {}
    if isinstance(model, str):
        refuse_adapter(model, init_kwargs)
        if kind is None:
            is_encoder_decoder = AutoConfig.from_pretrained(model, **init_kwargs).is_encoder_decoder
            kind = AutoModelForSeq2SeqLM if is_encoder_decoder else AutoModelForCausalLM
        kwargs |= init_kwargs
        return from_pretrained(kind, model, only_adapters=trains_only_adapters(peft_config), **kwargs)
    refuse_init_kwargs(init_kwargs)
    return model


def load_reference_model(
    ref_model: Model | str | None, init_kwargs: Mapping[str, Any] | None, peft_config: PeftConfig | None
) -> Model | None:
    """The reference of a policy as `load_language_model` loads it; None stays None.

    Raises:
        ValueError: init_kwargs for a reference without a name.
    """
    if init_kwargs and not isinstance(ref_model, str):
        raise ValueError(
            f"ref_model_init_kwargs={without_secrets(init_kwargs)} say how to load a reference, and ref_model is no "
            "name. Pass its name, or leave ref_model_init_kwargs out."
        )
    return load_language_model(ref_model, init_kwargs, peft_config)


def load_processing_class(
    processing_class: Processor | None, model: Model, init_kwargs: Mapping[str, Any] | None
) -> Processor:
    """The processing class, or the one saved with the model.

    Args:
        init_kwargs: arguments of `from_pretrained` that the model was loaded with, such as its revision.

    Raises:
        ValueError: there is neither a processing class nor a name that the model was loaded from.
    """
    if processing_class is not None:
        return processing_class
    if not (name := model.config.name_or_path):
        raise ValueError(
            f"The {type(model).__name__} was not loaded by name, so its tokenizer cannot be found. Pass "
            "processing_class=tokenizer."
        )
    options = tokenizer_options(init_kwargs)
    try:
        return AutoProcessor.from_pretrained(name, **options)
    except (OSError, ValueError):
        return AutoTokenizer.from_pretrained(name, **options)


def with_adapters(model: Model, peft_config: PeftConfig | None, args: TrainingArguments) -> Model:
    """Prepares a model for training: quantized weights, adapters, and inputs that require gradients.

    Raises:
        ValueError: peft_config for a model that has adapters already.
    """
    if peft_config is not None and isinstance(model, PeftModel):
        raise ValueError(
            "The model has adapters already, and peft_config would put new ones around them. Leave peft_config out to "
            "train these, or pass model.merge_and_unload() to start new ones from them."
        )
    is_checkpointing, checkpointing_kwargs = checkpointing_of(args)
    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        model = prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=is_checkpointing,
            gradient_checkpointing_kwargs=checkpointing_kwargs,
        )
        if isinstance(model, PeftModel):  # the call above freezes the adapters that a model has, too
            for weight in trained:
                weight.requires_grad_(True)
    if peft_config is not None:
        model = cast(PeftModel, get_peft_model(base_of(model), peft_config))
    bar_packing(model)
    if is_checkpointing and isinstance(model, PeftModel):
        # Frozen embeddings give outputs without gradients, so a checkpointed block over them would get none.
        model.enable_input_require_grads()
    return model


def fixed_reference(model: Model, ref_model: Model | None, accelerator: Accelerator) -> Reference:
    """The reference of a policy with its present weights, where it runs, with a forward that scores tokens.

    See `Reference.of` for the arguments and errors.
    """
    reference = Reference.of(model, ref_model)
    if not reference.is_policy:
        score_tokens_in_forward(on_one_device(reference.model, accelerator.device))
        reference.prepare(accelerator)
    return reference


def prepare_sharding(model: Model, accelerator: Accelerator) -> None:
    """Checks that the accelerator can shard the model, if asked to, and keeps the precision of its outputs.

    Raises:
        ValueError: other modules than the input embeddings and the LM head share a weight, as those of T5 and BART.
    """
    if not accelerator.is_fsdp2:
        return
    together = (model.get_input_embeddings(), model.get_output_embeddings())  # one group of accelerate's
    holders: dict[nn.Parameter, list[tuple[str, nn.Module]]] = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders[parameter].append((name, module))
    for modules in holders.values():
        if len(modules) > 1 and any(module not in together for _, module in modules):
            names = ", ".join(name for name, _ in modules)
            raise ValueError(
                f"FSDP2 cannot shard {type(model).__name__}: {names} share one weight, and accelerate puts only the "
                "input embeddings and the LM head into one group. Train it with DDP or DeepSpeed."
            )
    keep_output_precision(accelerator)
