"""The collator of rows of token ids and labels."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trimtab_lm.data.formats import Row
from trimtab_lm.interface import Batch
from trimtab_lm.tokens.layout import INPUT_KEYS, Layout, TokenGroup, lay_out
from trimtab_lm.tokens.positions import Positions


class DocumentCollator:
    """Collates rows of `input_ids` and `labels` into the model's inputs and labels.

    Labels are -100 where a token does not count; in a row without labels every token counts. Tokens that an
    `attention_mask` masks, such as padding, are dropped. Packed rows (with `seq_lengths`, or with `position_ids` that
    start again) are split into their documents, and documents without a counted token are left out.

    Args:
        pad_token_id: the token that pads rows.
        layout: how the batch is laid out, see `trimtab_lm.tokens.layout`.
        decoder_start_token_id: what the decoder of an encoder-decoder reads first.
        positions: the model's positions; None skips the check of the documents' length.
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

    def __call__(self, rows: Sequence[Row]) -> Batch:
        """Returns the model's inputs and `labels`, each [rows, width].

        Raises:
            ValueError: a document is longer than the model's positions.
        """
        if self.layout == "encoder-decoder":
            groups = [_read_and_written(row) for row in rows]
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
        return {name: batch[name] for name in INPUT_KEYS if name in batch} | {"labels": labels.view_as(read)}


def documents(row: Row) -> Iterator[TokenGroup]:
    """Yields the documents of a row with at least one counted token; the first document if there is none."""
    ids = as_list(row["input_ids"])
    labels = as_list(row.get("labels", ids))
    real = _real(row)
    spans = [[i for i in range(len(ids))[span] if real[i]] for span in _spans(row, len(ids))]
    counted = [span for span in spans if any(labels[i] != -100 for i in span[1:])]
    for span in counted or [span for span in spans if span][:1]:
        yield TokenGroup.document([ids[i] for i in span], [int(labels[i] != -100) for i in span])


def _read_and_written(row: Row) -> TokenGroup:
    """Returns what the encoder reads and the decoder writes, without padding."""
    read = [token for token, one in zip(as_list(row["input_ids"]), _real(row), strict=True) if one]
    written = [label for label in as_list(row["labels"]) if label != -100]
    return TokenGroup(read, [written], [[1] * len(written)])


def _spans(row: Row, length: int) -> Iterator[slice]:
    """Yields the span of each document in a row of so many tokens."""
    if "seq_lengths" in row:
        ends = [*torch.as_tensor(row["seq_lengths"]).cumsum(0).tolist()]
    elif "position_ids" in row:
        ends = [i for i, position in enumerate(as_list(row["position_ids"])) if i and position == 0] + [length]
    else:
        ends = [length]
    for start, end in zip([0, *ends], ends, strict=False):
        yield slice(start, end)


def _real(row: Row) -> list[int]:
    """Returns the row's attention mask; ones if it has none."""
    mask = row.get("attention_mask")
    return [1] * len(row["input_ids"]) if mask is None else as_list(mask)


def as_list(values: Any) -> list[int]:
    """Returns a tensor, an array or a sequence as a list."""
    return values.tolist() if hasattr(values, "tolist") else list(values)
