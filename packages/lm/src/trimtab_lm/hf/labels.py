"""Language models scored on the labels of a batch: what trainers of labels share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trimtab_common.stats import Mean
from trimtab_lm.models.interface import base_of
from trimtab_lm.tokens.layout import from_labels, token_columns
from trimtab_lm.tokens.logprobs import TokenScores, score_logits

from .adapter import Batch


def score_labels(model: nn.Module, batch: Batch, *, policy: Any) -> TokenScores:
    """Scores [N] of the labels that count.

    Args:
        model: as it is wrapped; its forward takes `tokens`.
        batch: model inputs and `labels` [B, T], -100 where a token does not count. Decoder inputs of an encoder-decoder
            model that a collator leaves out are made of the labels.
        policy: the same model, not wrapped.
    """
    base: Any = base_of(policy)
    is_encoder_decoder = bool(base.config.is_encoder_decoder)
    if is_encoder_decoder and "decoder_input_ids" not in batch:
        batch = {**batch, "decoder_input_ids": base.prepare_decoder_input_ids_from_labels(batch["labels"])}
    labels = from_labels(batch["labels"], is_encoder_decoder=is_encoder_decoder)
    return model(tokens=token_columns(batch) | labels)


def count_labels(labels: Tensor, *, is_encoder_decoder: bool) -> Tensor:
    """How many labels count; a decoder's first one does not, because no token predicts it."""
    return (labels[:, 0 if is_encoder_decoder else 1 :] != -100).sum()


def label_stats(scores: TokenScores) -> dict[str, Mean]:
    """Loss and entropy per token, in nats."""
    return {"entropy": Mean.of(scores.entropy), "loss": Mean.of(-scores.logprobs)}


def stats_of_logits(
    logits: Tensor | tuple[Tensor, ...], labels: Tensor, *, is_encoder_decoder: bool
) -> dict[str, Mean]:
    """The same of logits [B, T, V], or of a tuple that begins with them."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    tokens = from_labels(labels, is_encoder_decoder=is_encoder_decoder)
    return label_stats(score_logits(logits.flatten(0, 1).index_select(0, tokens["source"]), tokens["targets"]))


def numbered_rows(collate: Callable[[list[Any]], Batch]) -> Callable[[list[Any]], Batch]:
    """A collator of `input_ids` and `labels` that adds the column `row`: the row that each position comes from."""

    def collated(rows: list[Any]) -> Batch:
        numbers = [
            {**row, "input_ids": [i] * len(row["input_ids"]), "labels": row.get("labels", row["input_ids"])}
            for i, row in enumerate(rows)
        ]
        return {**collate(rows), "row": collate(numbers)["input_ids"]}

    return collated


def labels_of_real_rows(batch: Batch, real_rows: int | None) -> Batch:
    """A batch in which only labels of the first `real_rows` rows count: by the column `row`, or else row by row."""
    if real_rows is None:
        return {name: value for name, value in batch.items() if name != "row"}
    labels = batch["labels"]
    row = batch.get("row", torch.arange(len(labels), device=labels.device)[:, None])
    row = row if row.shape == labels.shape else row[:, :1]  # of an encoder: the decoder's rows are the same
    rest = {name: value for name, value in batch.items() if name != "row"}
    return {**rest, "labels": labels.masked_fill(row >= real_rows, -100)}
