"""The types of models, tokenizers and datasets that trainers take, and functions that look inside their wrappers."""

import copy
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias, cast

from datasets import Dataset, IterableDataset
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

Model: TypeAlias = PreTrainedModel | PeftModel
"""A transformers model, with or without PEFT adapters around it."""

Processor: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin
"""A tokenizer, or a multimodal processor that holds one."""

Data: TypeAlias = Dataset | IterableDataset
"""A dataset in memory or on disk, or a stream of rows."""

Batch: TypeAlias = dict[str, Tensor]
"""Named tensors of one batch: model inputs, labels and columns of `trimtab_lm.tokens.layout.lay_out`."""

ModelInputs: TypeAlias = dict[str, Any]
"""Keyword arguments of a model's forward: tensors, and where a model takes them block masks and encoder outputs."""

Forward: TypeAlias = Callable[..., Any]
"""A model's forward: takes `ModelInputs` by keyword and returns a transformers ModelOutput."""


def base_of(model: Model) -> PreTrainedModel:
    """Returns the transformers model itself, without the PEFT wrapper around it."""
    return cast(PreTrainedModel, model.get_base_model()) if isinstance(model, PeftModel) else model


def learns_prompt(model: object) -> bool:
    """Whether a PEFT method puts virtual tokens before the text."""
    return isinstance(model, PeftModel) and bool(model.active_peft_config.is_prompt_learning)


def scores_last_token(base: PreTrainedModel) -> bool:
    """Whether it is a classifier whose linear layer `score` reads the states of one position: those of decoders."""
    return "score" in dict(base.named_children()) and not base.config.is_encoder_decoder


def refuse_virtual_tokens(model: Model) -> None:
    """Raises ValueError for a scorer whose PEFT method puts virtual tokens before the text."""
    if isinstance(model, PeftModel) and learns_prompt(model):
        raise ValueError(
            f"{model.active_peft_config.peft_type} puts virtual tokens before a text, and no score can be read "
            "after them. Use adapters in the layers, such as LoRA."
        )


OWN_PADDING = "Give the tokenizer a separate pad token: tokenizer.pad_token = '<pad>', if the vocabulary has it."
"""How to tell padding from EOS."""


def refuse_eos_as_padding(tokenizer: PreTrainedTokenizerBase, base: PreTrainedModel) -> None:
    """Raises ValueError if padding is EOS and the classifier, which is no decoder, finds padding by its id."""
    is_eos = tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id
    if is_eos and not scores_last_token(base):
        raise ValueError(
            f"{type(base).__name__} finds padding by its id, which is the id of EOS here, where texts end. "
            f"{OWN_PADDING}"
        )


def trunk_of(base: PreTrainedModel) -> PreTrainedModel:
    """Returns the model without its heads; a model without heads is its own trunk.

    It is `base.base_model`. Some causal classes (Llama 4, Mllama) name a prefix that is not an attribute; their trunk
    is the only child that is a transformers model.
    """
    parts = [part for part in base.children() if isinstance(part, PreTrainedModel)]
    has_lost_trunk = base.base_model is base and base.get_output_embeddings() is not None and len(parts) == 1
    return parts[0] if has_lost_trunk else cast(PreTrainedModel, base.base_model)


def decoder_config(model: Model) -> PreTrainedConfig:
    """Returns the configuration of the text decoder, which is the model's own unless the model is multimodal."""
    return base_of(model).config.get_text_config(decoder=True)


def tokenizer_of(processor: Processor) -> PreTrainedTokenizerBase:
    """Returns the tokenizer, out of a multimodal processor if `processor` is one.

    Raises:
        TypeError: it is no tokenizer, and holds none.
    """
    tokenizer = getattr(processor, "tokenizer", None) if isinstance(processor, ProcessorMixin) else processor
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            f"A tokenizer is needed, and {type(processor).__name__} is none and holds none. The trainers learn from "
            "text alone: pass AutoTokenizer.from_pretrained(name)."
        )
    return tokenizer


def check_generation_config(model: Model, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Checks that the model can be saved with its generation config, which transformers validates when it saves.

    Args:
        model: to be trained. PEFT saves adapters without a generation config.
        tokenizer: whose special tokens Trainer writes into the generation config; None: it stays as it is.

    Raises:
        ValueError: saving would refuse the generation config.
    """
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        return
    config: Any = copy.deepcopy(model.generation_config)
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        held, token = getattr(config, name, None), getattr(tokenizer, name, None)
        if token is not None and token not in (held if isinstance(held, list) else [held]):
            setattr(config, name, token)
    try:
        with TemporaryDirectory() as folder:
            config.save_pretrained(folder)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{type(model).__name__} cannot be saved, because transformers refuses its generation config. Change "
            f"model.generation_config before you pass the model: {error}"
        ) from error


def decoder_start_of(model: Model) -> int | None:
    """Returns the token id that the decoder reads first; None for a causal model, which has no such token.

    Generation reads the id from the generation configuration and falls back to the model's configuration. Training
    reads it in the same order, so that a model is trained on what it samples from.

    Raises:
        ValueError: the model is an encoder-decoder, and neither configuration has a `decoder_start_token_id`.
    """
    base = base_of(model)
    if not base.config.is_encoder_decoder:
        return None
    sources = [base.generation_config, base.config] if base.can_generate() else [base.config]
    for source in sources:
        # T5Config has the field only where the checkpoint or the user has set it.
        if (start := getattr(source, "decoder_start_token_id", None)) is not None:
            return int(start)
    raise ValueError(
        f"{type(base).__name__} names no decoder_start_token_id, so its decoder has no first token to read. Set it in "
        "model.generation_config."
    )
