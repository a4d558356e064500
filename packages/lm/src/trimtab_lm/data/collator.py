"""Rows of token ids and labels as batches of documents."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab_lm.tokens.layout import Layout, TokenGroup, lay_out
from trimtab_lm.tokens.positions import Positions


class DocumentCollator:
    """Rows of `input_ids` and `labels` (-100 where a token does not count) as the model's inputs and labels.

    The documents of packed rows (`seq_lengths`, or `position_ids` that start again) are laid out one by one, those
    without a token that counts left out. Without labels every token counts. layout: set by the trainer. positions: of
    the model; ValueError for a document that is longer.
    """

    def __init__(
        self,
        pad_token_id: int,
        *,
        layout: Layout,
        decoder_start_token_id: int | None = None,
        positions: Positions | None = None,
    ):
        self.pad_token_id, self.layout, self.decoder_start_token_id = pad_token_id, layout, decoder_start_token_id
        self.positions = positions

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        if self.layout == "encoder-decoder":
            groups = [
                TokenGroup(_list(row["input_ids"]), [_list(row["labels"])], [[1] * len(row["labels"])]) for row in rows
            ]
        else:
            groups = [document for row in rows for document in documents(row)]
            if self.positions is not None:
                longest = max(len(group.branches[0]) for group in groups)
                self.positions.check("A document is too long", decoder=longest, remedy="Lower the length of rows.")
        start = self.decoder_start_token_id
        batch = lay_out(groups, self.layout, pad_token_id=self.pad_token_id, decoder_start_token_id=start)
        read = batch.get("decoder_input_ids", batch["input_ids"])
        labels = torch.full_like(read, -100).flatten()
        labels[batch["source"] + (self.layout != "encoder-decoder")] = batch["targets"]
        kept = ("input_ids", "attention_mask", "position_ids", "decoder_input_ids", "decoder_attention_mask")
        return {name: batch[name] for name in kept if name in batch} | {"labels": labels.view_as(read)}


def documents(row: Mapping[str, Any]) -> Iterator[TokenGroup]:
    """The documents of a row that have a token to learn; of a row that has none, the whole row."""
    ids = _list(row["input_ids"])
    labels = _list(row.get("labels", ids))
    spans = list(_spans(row, len(ids)))
    counted = [span for span in spans if any(label != -100 for label in labels[span][1:])]
    for span in counted or spans[:1]:
        yield TokenGroup.document(ids[span], [int(label != -100) for label in labels[span]])


def _spans(row: Mapping[str, Any], length: int) -> Iterator[slice]:
    if "seq_lengths" in row:
        ends = [*torch.as_tensor(row["seq_lengths"]).cumsum(0).tolist()]
    elif "position_ids" in row:
        ends = [i for i, position in enumerate(_list(row["position_ids"])) if i and position == 0] + [length]
    else:
        ends = [length]
    for start, end in zip([0, *ends], ends, strict=False):
        yield slice(start, end)


def _list(values: Any) -> list[int]:
    return values.tolist() if isinstance(values, Tensor) else list(values)
