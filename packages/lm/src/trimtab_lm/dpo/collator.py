"""Batches of preference pairs: laid out with the prompt once, or padded in the documented columns.

Rows have the columns of `DPOTrainer.tokenize_row`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import send_to_device
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trimtab_lm.data.formats import Row
from trimtab_lm.tokens.layout import Layout, TokenGroup, from_labels, lay_out

SIDES = ("chosen", "rejected")
REFERENCE_COLUMNS = ("reference_chosen_logps", "reference_rejected_logps")
"""Log-probabilities of the answers under the reference, one number each, where they were precomputed."""

REFERENCE_DTYPE = torch.float32 if torch.backends.mps.is_available() else torch.float64  # MPS has no float64


@dataclass
class PreferencePairCollator:
    """Pairs in as few positions as the model allows, chosen answers before rejected: see `tokens.layout.lay_out`.

    layout: "padded" works for every decoder; the trainer sets the leanest one. hidden_size: see `lay_out`.
    decoder_start_token_id: for "encoder-decoder".
    """

    pad_token_id: int
    label_pad_token_id: int = -100
    layout: Layout = "padded"
    decoder_start_token_id: int | None = None
    hidden_size: int | None = None

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        batch = lay_out(
            [self._group(row) for row in rows],
            self.layout,
            pad_token_id=self.pad_token_id,
            hidden_size=self.hidden_size,
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


def count_pairs(batch: Mapping[str, Tensor]) -> int:
    """The pairs of a batch of either kind."""
    return len(batch["lengths"]) // 2 if "sequence" in batch else len(batch["chosen_labels"])


def concatenated_inputs(
    batch: Mapping[str, Tensor],
    is_encoder_decoder: bool = False,
    label_pad_token_id: int = -100,
    padding_value: int = 0,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """Padded columns of B pairs as rows of one batch: B chosen answers, then B rejected ones.

    Returns `concatenated_input_ids`, `concatenated_attention_mask` and `concatenated_labels`, each [2B, T] with a T of
    its own; of an encoder-decoder model the first two are those of the prompts, twice.
    """
    padding = {"labels": label_pad_token_id}
    joined = {}
    if is_encoder_decoder:
        for name in ("input_ids", "attention_mask"):
            joined[f"concatenated_{name}"] = batch[f"prompt_{name}"].repeat(2, 1).to(device)
    else:
        padding |= {"input_ids": padding_value, "attention_mask": 0}
    for name, value in padding.items():
        sides = [batch[f"{side}_{name}"] for side in SIDES]
        width = max(side.shape[1] for side in sides)
        rows = [F.pad(side, (0, width - side.shape[1]), value=value) for side in sides]
        joined[f"concatenated_{name}"] = torch.cat(rows).to(device)
    return joined


def tokens_of(trainer: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch as the trainer's models take it: sequence 2i is the chosen answer of pair i, 2i + 1 its rejected one."""
    config, kind = trainer.config, {"is_encoder_decoder": trainer.is_encoder_decoder}
    if "sequence" in batch:  # of PreferencePairCollator
        return send_to_device(dict(batch), config.device)
    marker, pad = config.label_pad_token_id, config.padding_value
    joined = concatenated_inputs(batch, **kind, label_pad_token_id=marker, padding_value=pad, device=config.device)
    labels = joined["concatenated_labels"]
    labels = labels.masked_fill(labels == marker, -100)
    tokens = from_labels(labels, **kind)
    check_lengths(tokens["lengths"])
    count = len(labels) // 2
    tokens["sequence"] = tokens["sequence"] % count * 2 + tokens["sequence"] // count
    tokens["lengths"] = tokens["lengths"].view(2, count).T.flatten()
    tokens |= {name: joined[f"concatenated_{name}"] for name in ("input_ids", "attention_mask")}
    if trainer.is_encoder_decoder:
        tokens |= decoder_inputs(labels, start=trainer.decoder_start_token_id, padding_value=pad)
    return tokens


def check_lengths(lengths: Tensor) -> None:
    """Raise ValueError for an answer without a token that counts; lengths: all chosen answers', then all rejected."""
    if not bool(lengths.all()):
        raise ValueError(
            f"Answers of this batch have {lengths.tolist()} labels that count (all chosen, then all "
            "rejected), and each needs one. Drop such pairs, or fix data_collator."
        )


def decoder_inputs(labels: Tensor, *, start: int, padding_value: int) -> dict[str, Tensor]:
    """The decoder's inputs for labels [B, T] (-100 without a label): the token before each."""
    read = F.pad(labels, (1, 0), value=start)[:, :-1]
    return {
        "decoder_input_ids": read.masked_fill(read == -100, padding_value),
        "decoder_attention_mask": F.pad((labels != -100).long(), (1, 0), value=1)[:, :-1],
    }
