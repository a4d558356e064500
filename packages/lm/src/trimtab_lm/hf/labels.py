"""Trainers of language models on labels: which tokens count, evaluation by logits, statistics."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer

from trimtab_common.stats import Mean
from trimtab_lm.data.collator import DocumentCollator
from trimtab_lm.data.formats import Row
from trimtab_lm.interface import Model, base_of, decoder_start_of
from trimtab_lm.sampling.rollout import padding_id
from trimtab_lm.tokens.forward import best_layout, score_tokens_in_forward
from trimtab_lm.tokens.layout import from_labels
from trimtab_lm.tokens.positions import Positions
from trimtab_lm.tokens.router import refuse_router_loss
from trimtab_lm.tokens.scores import TokenScores, score_logits

from .adapter import TrainerAdapter, is_noisy, real_rows
from .config import Config
from .models import with_adapters
from .types import Batch, Collate, DataSource, Prediction


class LabelTrainer(TrainerAdapter[Config, Tensor]):
    """Trains a language model on batches of model inputs and `labels` [B, T], -100 where a token does not count.

    A subclass supplies `tokenize_dataset` and `batch_loss`. Label smoothing, `compute_loss_func`, `compute_metrics` and
    `return_outputs` work on whole logits, as in transformers; without them no logits of a whole batch are held.
    """

    def prepare_model(self, model: Model) -> Model:
        """The model with its adapters, and with a forward that scores tokens."""
        model = with_adapters(model, self.peft_config, self.config)
        self.is_encoder_decoder = bool(base_of(model).config.is_encoder_decoder)  # the labels are the decoder's
        score_tokens_in_forward(model)
        if self.config.label_smoothing_factor:
            refuse_router_loss(model, "label_smoothing_factor", ", or leave label_smoothing_factor out")
        return model

    def count_items(self, batch: Batch) -> Tensor:
        """The tokens that count; a decoder-only model's first one does not, because no token predicts it."""
        return (batch["labels"][:, 0 if self.is_encoder_decoder else 1 :] != -100).sum()

    def without_repetitions(self, batch: Batch, real_rows: int | None) -> Batch:
        """A batch in which only labels of the first `real_rows` rows count: by the column `row`, or else row by row."""
        rest, labels = {name: value for name, value in batch.items() if name != "row"}, batch["labels"]
        if real_rows is None:
            return rest
        row = batch.get("row", torch.arange(len(labels), device=labels.device)[:, None])
        if self.is_encoder_decoder:
            row = row[:, :1]  # it has the encoder's positions, and the labels the decoder's
        return {**rest, "labels": labels.masked_fill(row >= real_rows, -100)}

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """`batch_loss`; but transformers' own loss for label smoothing, compute_loss_func, or with return_outputs.

        The outputs are the model's own, whole logits included.
        """
        if return_outputs or self.has_loss_of_logits:
            return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    @property
    def has_loss_of_logits(self) -> bool:
        """Whether the loss works on whole logits."""
        return self.label_smoother is not None or self.compute_loss_func is not None

    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Prediction:
        """The loss, and logits and labels where they are asked for."""
        if prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only)
        inputs = self.without_repetitions(inputs, real_rows(self))
        loss, logits, labels = Trainer.prediction_step(self, model, inputs, prediction_loss_only, ignore_keys)
        if not self.has_loss_of_logits:
            whole: Tensor = logits[0] if isinstance(logits, tuple) else logits  # type: ignore[assignment]
            tokens = from_labels(labels, is_encoder_decoder=self.is_encoder_decoder)  # type: ignore[arg-type]
            scores = score_logits(whole.flatten(0, 1).index_select(0, tokens["source"]), tokens["targets"])
            self.recorder.add(label_stats(scores), training=False)
        return loss, logits, labels

    def get_eval_dataloader(self, eval_dataset: DataSource | str | None = None) -> DataLoader[Batch]:
        """Batches for evaluation; a dataset that was not given to the constructor is prepared here."""
        with evaluation_collator(self, is_row_by_row=self.compute_metrics is not None):
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: DataSource) -> DataLoader[Batch]:
        """Batches for `predict`, with one row per row of the dataset."""
        with evaluation_collator(self, is_row_by_row=True):
            return super().get_test_dataloader(test_dataset)


def document_collator(trainer: LabelTrainer[Any]) -> DocumentCollator:
    """A collator of `input_ids` and `labels` in the best layout for the model; masks padding by its place."""
    pad_token_id = padding_id(trainer.tokenizer) or 0  # a tokenizer may have neither padding nor end
    layout = best_layout(trainer.model, share_prefix=False, is_noisy=is_noisy(trainer))
    if layout == "row" and trainer.has_loss_of_logits:  # transformers would build a mask of the whole row
        layout = "packed"
    start, positions = decoder_start_of(trainer.model), Positions.of(trainer.model)
    return DocumentCollator(pad_token_id, layout=layout, decoder_start_token_id=start, positions=positions)


@contextmanager
def evaluation_collator(trainer: LabelTrainer[Any], *, is_row_by_row: bool) -> Iterator[None]:
    """The collator of data loaders that are built inside the block.

    Row by row, logits go with the labels of their row. Over several processes, positions name their rows.
    """
    collator = trainer.data_collator
    if is_row_by_row and isinstance(collator, DocumentCollator) and collator.layout in ("row", "packed"):
        trainer.data_collator = DocumentCollator(collator.pad_token_id, layout="padded")
    if isinstance(collator, DocumentCollator) and trainer.accelerator.num_processes > 1:
        trainer.data_collator = numbered_rows(trainer.data_collator)
    try:
        yield
    finally:
        trainer.data_collator = collator


def label_stats(scores: TokenScores) -> dict[str, Mean]:
    """Loss, with the router's, and entropy per token, in nats."""
    return {"entropy": Mean.of(scores.entropy), "loss": Mean.of(scores.router_loss - scores.logprobs)}


def numbered_rows(collate: Collate) -> Collate:
    """A collator of `input_ids` and `labels` that adds the column `row`: the row that each position comes from."""

    def collated(rows: Sequence[Row]) -> Batch:
        numbers = [
            {**row, "input_ids": [i] * len(row["input_ids"]), "labels": row.get("labels", row["input_ids"])}
            for i, row in enumerate(rows)
        ]
        return {**collate(rows), "row": collate(numbers)["input_ids"]}

    return collated
