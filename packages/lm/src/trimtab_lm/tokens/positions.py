"""How many positions a model has, and the check that a sequence fits into them."""

from typing import Any, NamedTuple

from peft import PeftModel
from torch import Tensor, nn

from trimtab_lm.tokens.forward import base_of

TABLES = ("wpe", "embed_positions", "position_embeddings", "position_embedding", "positions_embed", "pos_encoding")
"""What transformers' models call a table with one row for each position."""


class Positions(NamedTuple):
    """The longest sequences that a model can read; None where there is no limit.

    encoder: tokens that the encoder reads, None for a model without encoder. decoder: tokens that all other models
    read, in one sequence. model: the model's class, for messages.

    Only a table with one row for each position sets a limit (GPT-2, OPT, BART, BERT). Rotary, relative and ALiBi
    positions go on past `max_position_embeddings`, and tables that grow with the input have no end.
    """

    model: str
    encoder: int | None
    decoder: int | None

    @classmethod
    def of(cls, model: Any) -> "Positions":
        """The positions of a transformers model, with adapters or without; virtual tokens of a prompt take some."""
        base, virtual = base_of(model), 0
        if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
            virtual = model.active_peft_config.num_virtual_tokens
        encoder = _rows(base.get_encoder()) if base.config.is_encoder_decoder else None
        # MPT's ALiBi biases are computed for so many positions and no more.
        decoder = base.config.max_seq_len if base.config.model_type == "mpt" else _rows(base.get_decoder())
        return cls(type(base).__name__, encoder, None if decoder is None else decoder - virtual)

    @property
    def is_limited(self) -> bool:
        return self.encoder is not None or self.decoder is not None

    def check(self, what: str, *, decoder: int = 0, encoder: int = 0, remedy: str) -> None:
        """Raise ValueError where so many tokens do not fit into the decoder's or the encoder's positions.

        what: the subject of the message, such as "The text". remedy: its last sentence.
        """
        for count, limit in ((encoder, self.encoder), (decoder, self.decoder)):
            if limit is not None and count > limit:
                raise ValueError(f"{what}: {count:,} tokens, and {self.model} has {limit:,} positions. {remedy}")

    def room(self, prompt: int, *, is_encoder_decoder: bool) -> int | None:
        """How many tokens can be sampled after a prompt of so many; None where there is no limit."""
        return self.decoder if self.decoder is None or is_encoder_decoder else self.decoder - prompt

    def check_sample(self, prompt: int, new: int, *, is_encoder_decoder: bool, remedy: str) -> None:
        """Raise ValueError where a prompt of so many tokens leaves no room for so many new ones."""
        if is_encoder_decoder:
            self.check("The prompt is too long", encoder=prompt, remedy=remedy)
            self.check("The response may become too long", decoder=new, remedy=remedy)
        else:
            what = f"A prompt of {prompt:,} tokens with {new:,} new ones is too long"
            self.check(what, decoder=prompt + new, remedy=remedy)


def _rows(module: Any) -> int | None:
    """The number of positions of the smallest table in a module; None without a table."""
    tables = [
        child for parent in module.modules()
        for name, child in [*parent.named_children(), *parent.named_buffers(recurse=False)] if name in TABLES
    ]  # fmt: skip
    return min((size for table in tables if (size := _size(table)) is not None), default=None)


def _size(table: nn.Module | Tensor) -> int | None:
    """The number of positions of a table; None for a module that makes its rows as they are needed."""
    if isinstance(table, Tensor):
        return len(table)
    if not isinstance(table, nn.Embedding) or hasattr(table, "make_weight"):
        return None
    if table.padding_idx is not None:  # RoBERTa: the first position comes after the one of padding
        return table.num_embeddings - table.padding_idx - 1
    return table.num_embeddings - getattr(table, "offset", 0)  # OPT and BART begin at position 2
