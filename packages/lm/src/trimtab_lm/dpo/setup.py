"""The models of a DPO run: the adapter that trains, and the reference."""

import warnings

from accelerate import Accelerator
from peft import PeftConfig, PeftModel
from transformers import PreTrainedTokenizerBase

from trimtab_lm.data.tokenization import require_eos
from trimtab_lm.hf.models import fixed_reference, load_reference_model, with_adapters
from trimtab_lm.interface import Model, base_of
from trimtab_lm.models.reference import Reference

from .config import DPOConfig


def make_trainable(model: Model, peft_config: PeftConfig | None, config: DPOConfig) -> Model:
    """The model with the adapters of peft_config, which trains the adapter `model_adapter_name`.

    Adapters that a model brings beside a peft_config are merged into its weights first, with a warning.

    Raises ValueError for a name that the model does not have, and if the adapter that trains would be the reference.
    """
    if peft_config is not None and isinstance(model, PeftModel):
        model = _merged(model, config)
    model = with_adapters(model, peft_config, config)
    known = list(model.peft_config) if isinstance(model, PeftModel) else []
    if config.model_adapter_name is not None:
        if config.model_adapter_name not in known:
            raise ValueError(
                f"model_adapter_name={config.model_adapter_name!r}, but the model has the adapters {known}. Load it "
                "into the model first: PeftModel.from_pretrained(model, folder, adapter_name=name, is_trainable=True)."
            )
        model.set_adapter(config.model_adapter_name)
    if isinstance(model, PeftModel) and config.ref_adapter_name in model.active_adapters:
        raise ValueError(
            f"ref_adapter_name={config.ref_adapter_name!r} is the adapter that trains, so the reference would move "
            "with the policy. Name the one to train by model_adapter_name."
        )
    return model


def _merged(model: PeftModel, config: DPOConfig) -> Model:
    """The model under its adapters, with the active one merged into the weights; ValueError where that cannot be."""
    active, others = model.active_adapters, sorted(set(model.peft_config) - set(model.active_adapters))
    if config.ref_adapter_name is not None or config.model_adapter_name is not None:
        raise ValueError(
            f"model_adapter_name={config.model_adapter_name!r} and ref_adapter_name={config.ref_adapter_name!r} name "
            "adapters of the model, and peft_config would put a new one in the place of all of them. Leave peft_config "
            "out to train an adapter of the model, or leave the names out."
        )
    if any(model.peft_config[name].is_prompt_learning for name in active):
        raise ValueError(
            f"peft_config adds adapters to a model whose {active} is a learned prompt, which cannot be merged into the "
            "weights. Leave peft_config out to train it."
        )
    lost = f" Its adapters {others} are not active and are dropped." if others else ""
    warnings.warn(
        f"The model has adapters, and peft_config adds new ones: {active} is merged into the weights, in place, and "
        f"the merged model is the reference.{lost} Leave peft_config out to train the adapters of the model.",
        stacklevel=7,
    )
    return model.merge_and_unload()


def load_reference(ref_model: Model | str | None, config: DPOConfig, peft_config: PeftConfig | None) -> Model | None:
    """The reference model that was given, loaded if it was given by its name; None if there is none to load.

    Without a dtype it loads in the type of a policy that is given by its name.

    Raises ValueError where it has no place beside the config's settings.
    """
    for name in ("reference_free", "ref_adapter_name"):
        if ref_model is not None and getattr(config, name):
            raise ValueError(f"ref_model and {name}={getattr(config, name)!r} are two references. Choose one.")
    return load_reference_model(ref_model, config.ref_model_init_kwargs, peft_config)


def make_reference(
    model: Model, ref_model: Model | None, config: DPOConfig, accelerator: Accelerator
) -> Reference | None:
    """The fixed policy of a run, from the model as it is now; None if it is reference-free.

    Where log-probabilities are precomputed the policy itself serves, because it has not been trained yet.
    """
    if config.reference_free:
        return None
    if config.ref_adapter_name is not None:
        return Reference.of_adapter(model, config.ref_adapter_name)
    if config.precompute_ref_log_probs and ref_model is None and not isinstance(model, PeftModel):
        return Reference(model, is_adapter_off=False)
    return fixed_reference(model, ref_model, accelerator)


def check_kind(model: Model, config: DPOConfig) -> bool:
    """Whether the model is an encoder-decoder; ValueError if the config says otherwise."""
    base = base_of(model)
    is_encoder_decoder = bool(base.config.is_encoder_decoder)
    if config.is_encoder_decoder not in (None, is_encoder_decoder):
        raise ValueError(
            f"is_encoder_decoder={config.is_encoder_decoder}, but {type(base).__name__} says {is_encoder_decoder}. "
            "Leave it out: it is read off the model."
        )
    return is_encoder_decoder


def padding_of(tokenizer: PreTrainedTokenizerBase, config: DPOConfig) -> int:
    """The padding token. It may be EOS, because a batch's masks depend on places, not on tokens."""
    choices = (config.padding_value, tokenizer.pad_token_id, require_eos(tokenizer))
    return next(int(choice) for choice in choices if choice is not None)
