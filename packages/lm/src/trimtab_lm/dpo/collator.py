"""Batches of preference pairs: laid out with the prompt once, or padded in the documented columns.

Rows have the columns of `DPOTrainer.tokenize_row`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trimtab_lm.data.formats import Row
from trimtab_lm.tokens.layout import Layout, TokenGroup, lay_out

SIDES = ("chosen", "rejected")
REFERENCE_COLUMNS = ("reference_chosen_logps", "reference_rejected_logps")
"""Log-probabilities of the answers under the reference, one number each, where they were precomputed."""

REFERENCE_DTYPE = torch.float32 if torch.backends.mps.is_available() else torch.float64  # MPS has no float64


@dataclass
class PreferencePairCollator:
    """Pairs in as few positions as the model allows, chosen answers before rejected: see `tokens.layout.lay_out`.

    layout: "padded" works for every decoder; the trainer sets the leanest one. decoder_start_token_id: for
    "encoder-decoder".
    """

    pad_token_id: int
    label_pad_token_id: int = -100
    layout: Layout = "padded"
    decoder_start_token_id: int | None = None

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        batch = lay_out(
            [self._group(row) for row in rows],
            self.layout,
            pad_token_id=self.pad_token_id,
            decoder_start_token_id=self.decoder_start_token_id,
        )
        if not bool(batch["lengths"].all()):
            raise ValueError(
                f"Answers of these pairs have {batch['lengths'].tolist()} tokens that count (chosen and rejected, pair "
                "by pair), and each needs one. Drop such pairs, or fix their labels."
            )
        given = [name for name in REFERENCE_COLUMNS if name in rows[0]]
        return batch | {name: torch.tensor([row[name] for row in rows], dtype=REFERENCE_DTYPE) for name in given}

    def _group(self, row: Row) -> TokenGroup:
        labels = [list(row[f"{side}_labels"]) for side in SIDES]
        counts = [[int(label != self.label_pad_token_id) for label in side] for side in labels]
        if self.layout == "encoder-decoder":
            pad, marker = self.pad_token_id, self.label_pad_token_id
            ids = [[label if label != marker else pad for label in side] for side in labels]
            return TokenGroup(row["prompt_input_ids"], ids, counts)
        return TokenGroup.of_sequences([row[f"{side}_input_ids"] for side in SIDES], counts)


@dataclass
class DPODataCollatorWithPadding:
    """Pads each column by itself; the prompt is repeated in the row of each answer.

    pad_token_id, label_pad_token_id: what pads columns named `*_input_ids` and `*_labels`; `*_attention_mask` are
    padded with 0. is_encoder_decoder: whether prompts are padded on the right, for the encoder, or on the left, ready
    to be continued. Answers are padded on the right. The reference's log-probabilities become a tensor; every other
    column is given on as a list.
    """

    pad_token_id: int = 0
    label_pad_token_id: int = -100
    is_encoder_decoder: bool | None = False

    def __call__(self, features: Sequence[Row]) -> dict[str, Tensor | list[object]]:
        return {name: self._column(name, [row[name] for row in features]) for name in features[0]}

    def _column(self, name: str, values: list[Any]) -> Tensor | list[object]:
        if name in REFERENCE_COLUMNS:
            return torch.tensor(values, dtype=REFERENCE_DTYPE)
        padding = {"input_ids": self.pad_token_id, "attention_mask": 0, "labels": self.label_pad_token_id}
        kind = next((kind for kind in padding if name.endswith(f"_{kind}")), None)
        if kind is None:
            return values
        side = "left" if name.startswith("prompt_") and not self.is_encoder_decoder else "right"
        rows = [torch.as_tensor(value, dtype=torch.long) for value in values]
        return pad_sequence(rows, batch_first=True, padding_value=padding[kind], padding_side=side)
