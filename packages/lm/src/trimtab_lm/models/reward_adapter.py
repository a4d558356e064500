"""A reward model as a second adapter on the policy's base model, with a score head."""

import warnings
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from peft.utils import load_peft_weights
from torch import Tensor, nn

from trimtab_lm.interface import Model, base_of
from trimtab_lm.tokens.dropout import without_dropout
from trimtab_lm.tokens.logprobs import state_width

SCORE = "score"
"""The name that sequence classifiers of decoder models give their head."""


def load_reward_adapter(model: Model, source: str, name: str, **hub: Any) -> nn.Linear:
    """Loads the adapter of a sequence classifier into a policy, frozen and inactive, and returns its score head.

    Args:
        model: the policy, a PeftModel on the base model that the reward model was trained on.
        source: hub id or folder of the reward model's adapter with its score head (`modules_to_save=["score"]`, which
            PEFT adds by itself for `task_type="SEQ_CLS"`).
        name: the name that the adapter gets in `model`.
        hub: token, cache_dir and other options of the download.

    Returns:
        The score head [labels, hidden], in float32 or more, frozen.

    Raises:
        ValueError: the model has no adapters or has one of this name, or the folder's weights do not fit the model or
            have no score head.
    """
    if not isinstance(model, PeftModel):
        raise ValueError(
            f"reward_adapter={source!r} needs a policy with an adapter, because the two share one base model, and "
            f"{type(model).__name__} has none. Pass peft_config, or a model with an adapter."
        )
    if name in model.peft_config:
        raise ValueError(f"The model already has an adapter {name!r}; pass another reward_adapter_name.")
    trained_on, base = PeftConfig.from_pretrained(source, **hub).base_model_name_or_path, base_of(model).name_or_path
    if trained_on and base and trained_on != base:
        warnings.warn(
            f"The reward adapter {source} was trained on {trained_on}, and the policy's base model is {base}. If their "
            "weights differ, the scores mean nothing.",
            stacklevel=3,
        )
    score = _score_head(model, source, load_peft_weights(source, device="cpu", **hub))
    # PEFT puts the whole model into eval mode when it loads an adapter that does not train.
    with torch.no_grad(), without_dropout(model):
        result = model.load_adapter(source, name, is_trainable=False, **hub)
    unknown = [key for key in result.unexpected_keys if SCORE not in key.split(".")]
    if unknown or result.missing_keys:
        model.delete_adapter(name)
        raise ValueError(
            f"The reward adapter {source} does not fit {type(base_of(model)).__name__}: it holds "
            f"{unknown[:2]}, which the model lacks, and lacks {list(result.missing_keys)[:2]}. Train it on the "
            "policy's base model."
        )
    return score


def _score_head(model: PeftModel, source: str, weights: dict[str, Tensor]) -> nn.Linear:
    """Builds the score head out of the reward adapter's weights."""
    # Versions of PEFT differ in whether the head's keys contain `modules_to_save`.
    stored = {key.rpartition(".")[2]: value for key, value in weights.items() if SCORE in key.split(".")}
    width = state_width(model)
    if "weight" not in stored or stored["weight"].ndim != 2 or stored["weight"].shape[1] != width:
        held = {key: tuple(value.shape) for key, value in stored.items()} or "none"
        raise ValueError(
            f"The reward adapter {source} needs a score head of shape [labels, {width}], and has {held}. Train it as "
            'the adapter of an AutoModelForSequenceClassification, with LoraConfig(task_type="SEQ_CLS").'
        )
    dtype = torch.promote_types(stored["weight"].dtype, torch.float32)
    labels = len(stored["weight"])
    head = nn.Linear(width, labels, bias="bias" in stored, dtype=dtype, device=model.device)
    head.load_state_dict(stored)
    return head.requires_grad_(False)
