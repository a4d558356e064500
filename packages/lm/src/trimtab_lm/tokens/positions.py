"""The number of positions of a model, the check that a sequence fits, and position ids that skip padding."""

import inspect
import warnings
from typing import NamedTuple

from peft import PeftModel
from torch import Tensor, nn

from trimtab_lm.interface import Forward, Model, ModelInputs, base_of, decoder_config

TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding", "positions_embed", "pos_encoding")
"""The names that transformers' models give a table with one row for each position."""


class Positions(NamedTuple):
    """The longest sequences that a model can read.

    Only a table with one row for each position sets a limit (GPT-2, OPT, BART, BERT). Rotary, relative and ALiBi
    positions go on past `max_position_embeddings`, with a warning, and tables that grow with the input have no end.

    Args:
        model: the name of the model's class, for messages.
        encoder: tokens that the encoder can read; None without a limit or without an encoder.
        decoder: tokens that the decoder, or a model of one part, can read in one sequence; None without a limit.
        trained: tokens for which a decoder without a limit was trained; None: unknown.
    """

    model: str
    encoder: int | None
    decoder: int | None
    trained: int | None = None

    @classmethod
    def of(cls, model: Model) -> "Positions":
        """Returns the positions of a model, less those that the virtual tokens of prompt tuning take."""
        base, virtual = base_of(model), 0
        if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
            virtual = model.active_peft_config.num_virtual_tokens
        encoder = _rows(base.get_encoder()) if base.config.is_encoder_decoder else None
        # MPT computes its ALiBi biases for max_seq_len positions and no more.
        decoder = base.config.max_seq_len if base.config.model_type == "mpt" else _rows(base.get_decoder())
        if decoder is not None:
            return cls(type(base).__name__, encoder, decoder - virtual)
        config = decoder_config(model)
        trained = getattr(config, "max_position_embeddings", None) or 0
        is_scaled = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default") != "default"
        return cls(type(base).__name__, encoder, None, trained if trained > 0 and not is_scaled else None)

    @property
    def is_limited(self) -> bool:
        """Whether some sequence is too long for the model."""
        return self.encoder is not None or self.decoder is not None

    def check(self, what: str, *, decoder: int = 0, encoder: int = 0, remedy: str) -> None:
        """Checks that a sequence fits into the model's positions; warns if it is longer than those it was trained for.

        Args:
            what: the subject of the message, such as "The text is too long".
            decoder: tokens that the decoder, or a model of one part, is to read.
            encoder: tokens that the encoder is to read.
            remedy: the last sentence of the message.

        Raises:
            ValueError: the sequence does not fit.
        """
        for count, limit in ((encoder, self.encoder), (decoder, self.decoder)):
            if limit is not None and count > limit:
                raise ValueError(f"{what}: {count:,} tokens, and {self.model} has {limit:,} positions. {remedy}")
        if self.trained is not None and decoder > self.trained:
            # Without the number of tokens, so that Python shows it once and not for every row.
            warnings.warn(
                f"Sequences may reach beyond the {self.trained:,} tokens for which {self.model} was trained "
                f"(max_position_embeddings of its configuration). {remedy}",
                stacklevel=3,
            )

    def room(self, prompt: int, *, is_encoder_decoder: bool) -> int | None:
        """Returns how many tokens can be sampled after a prompt of `prompt` tokens; None without a limit."""
        return self.decoder if self.decoder is None or is_encoder_decoder else self.decoder - prompt

    def check_sample(self, prompt: int, new: int, *, is_encoder_decoder: bool, remedy: str) -> None:
        """Checks that `new` tokens can be sampled after a prompt of `prompt` tokens.

        Args:
            new: the maximum number of sampled tokens.
            is_encoder_decoder: whether an encoder reads the prompt.
            remedy: the last sentence of the message.

        Raises:
            ValueError: the prompt, or the prompt with the new tokens, does not fit.
        """
        if is_encoder_decoder:
            self.check("The prompt is too long", encoder=prompt, remedy=remedy)
            self.check("The response may become too long", decoder=new, remedy=remedy)
        else:
            what = f"A prompt of {prompt:,} tokens with {new:,} new ones is too long"
            self.check(what, decoder=prompt + new, remedy=remedy)


def _rows(module: nn.Module) -> int | None:
    """Returns the number of positions of the smallest table in a module; None without a table."""
    parts = (part for parent in module.modules() for part in (parent.named_children(), parent.named_buffers("", False)))
    tables = [table for part in parts for name, table in part if name in TABLES]
    return min((size for table in tables if (size := _size(table)) is not None), default=None)


def _size(table: nn.Module | Tensor) -> int | None:
    """Returns the number of positions of a table; None for a module that adds rows on demand."""
    if isinstance(table, Tensor):
        return len(table)
    if not isinstance(table, nn.Embedding) or hasattr(table, "make_weight"):  # FSMT's table grows
        return None
    if table.padding_idx is not None:  # RoBERTa's first position comes after the one of padding
        return table.num_embeddings - table.padding_idx - 1
    return table.num_embeddings - getattr(table, "offset", 0)  # OPT and BART begin at position 2, and name it


def positioned(forward: Forward, inputs: ModelInputs) -> ModelInputs:
    """Adds position ids that skip padding, if `forward` takes position ids and the inputs have a mask and none.

    They are 0 at padding on the left, which GPT-2 would count as text without them.

    Args:
        forward: the model's own forward, whose signature is read.
        inputs: `attention_mask` [B, T] says where padding is; without it the rows have none on the left.
    """
    has_ids = "position_ids" in inputs or "attention_mask" not in inputs
    if has_ids or "position_ids" not in inspect.signature(forward).parameters:
        return inputs
    return {**inputs, "position_ids": (inputs["attention_mask"].long().cumsum(-1) - 1).clamp(min=0)}
