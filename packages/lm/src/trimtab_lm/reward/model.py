"""Sequence classifiers as models that score texts."""

import copy
import math
import warnings

import torch
from peft import PeftConfig, PeftModel, TaskType
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trimtab_lm.data.tokenization import require_eos
from trimtab_lm.hf.config import CHECKPOINTING, checkpointing_of
from trimtab_lm.interface import (
    OWN_PADDING,
    Model,
    Processor,
    base_of,
    refuse_eos_as_padding,
    refuse_virtual_tokens,
    tokenizer_of,
)

from .config import RewardConfig


def require_scorer(model: Model, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the padding token that batches need in the model's configuration; warn of a model with several labels."""
    config = base_of(model).config
    if config.num_labels != 1:
        warnings.warn(
            f"The model has {config.num_labels} labels, and a score is one number. Each label is trained as a score of "
            "its own: the loss is the mean over labels, and a text's score is the mean of its labels. For one score "
            "load the model by AutoModelForSequenceClassification.from_pretrained(name, num_labels=1); of this one "
            "read either the mean or one label.",
            stacklevel=6,
        )
    config.pad_token_id = tokenizer.pad_token_id


def turn_off_missing_checkpointing(model: Model, args: RewardConfig) -> None:
    """Set the (own) arguments to train without activation checkpointing where the model has none, and warn."""
    base = base_of(model)
    if checkpointing_of(args)[0] and not base.supports_gradient_checkpointing:
        warnings.warn(
            f"{type(base).__name__} does not support activation checkpointing, which RewardConfig turns on by default: "
            "it trains without. gradient_checkpointing=False says so.",
            stacklevel=6,
        )
        for name in {CHECKPOINTING, "gradient_checkpointing"}:
            setattr(args, name, False)


def heads(base: PreTrainedModel) -> dict[str, nn.Module]:
    """The classifier's modules outside its trunk."""
    return {name: child for name, child in base.named_children() if name != base.base_model_prefix}


def init_head(base: PreTrainedModel, seed: int) -> None:
    """Sample the weights of the layers that give scores from N(0, 1 / (inputs + 1)), and set their biases to 0.

    Raises:
        ValueError: the classifier has no such linear layer.
    """
    layers = [
        layer
        for head in heads(base).values()
        for layer in head.modules()
        if isinstance(layer, nn.Linear) and layer.out_features == base.config.num_labels
    ]
    if not layers:
        raise ValueError(
            f"init_reward_head=True found no linear layer in {type(base).__name__} that gives a number for each of its "
            f"{base.config.num_labels} labels. Leave it out, and initialise the head yourself."
        )
    for layer in layers:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            weights = torch.randn(layer.weight.shape, generator=generator) / math.sqrt(layer.in_features + 1)
            layer.weight.copy_(weights)
            if layer.bias is not None:
                layer.bias.zero_()


def for_scores(peft_config: PeftConfig | None, model: Model) -> PeftConfig | None:
    """A copy that says that this is a classifier, whose head is trained and saved in full."""
    if peft_config is None:
        return None
    if peft_config.task_type not in (None, TaskType.SEQ_CLS):
        raise ValueError(
            f"peft_config.task_type={peft_config.task_type} does not fit a reward model. Use TaskType.SEQ_CLS, or "
            "leave it out."
        )
    peft_config = copy.deepcopy(peft_config)
    peft_config.task_type = TaskType.SEQ_CLS
    if hasattr(peft_config, "modules_to_save"):
        own = [name for name, head in heads(base_of(model)).items() if any(True for _ in head.parameters())]
        peft_config.modules_to_save = list(dict.fromkeys([*(peft_config.modules_to_save or []), *own]))
    return peft_config


def require_trained_head(model: Model) -> None:
    """ValueError for adapters that leave the head untrained, or scores unreadable."""
    if not isinstance(model, PeftModel):
        return
    refuse_virtual_tokens(model)
    if not any(p.requires_grad for head in heads(base_of(model)).values() for p in head.parameters()):
        raise ValueError(
            "The adapters leave the random weights of the score head untrained. Add the head to their "
            f"modules_to_save: {sorted(heads(base_of(model)))}."
        )


def with_padding(processing_class: Processor) -> Processor:
    """The processing class; a copy whose tokenizer pads with EOS if it has no padding token."""
    if tokenizer_of(processing_class).pad_token_id is not None:
        return processing_class
    processing_class = copy.deepcopy(processing_class)
    tokenizer = tokenizer_of(processing_class)
    tokenizer.pad_token_id = require_eos(tokenizer)
    return processing_class


def check_padding(tokenizer: PreTrainedTokenizerBase, model: Model) -> None:
    """Warn where padding is EOS, or ValueError if the model's own forward must tell them apart."""
    base = base_of(model)
    refuse_eos_as_padding(tokenizer, base)
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        warnings.warn(
            f"EOS is also the padding token. Here texts are scored at their EOS; transformers' own "
            f"{type(base).__name__} will score the token before it, and trimtab_lm.rewards.model.RewardModel will not. "
            f"{OWN_PADDING}",
            stacklevel=6,
        )
