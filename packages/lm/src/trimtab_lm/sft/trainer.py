"""Supervised fine-tuning on transformers.Trainer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from trimtab_lm.data.collator import DocumentCollator
from trimtab_lm.data.formats import RowFormat, columns_of
from trimtab_lm.data.tokenization import require_eos
from trimtab_lm.hf.adapter import Batch, BatchLoss, TrainerAdapter, Use
from trimtab_lm.hf.labels import (
    count_labels,
    label_stats,
    labels_of_real_rows,
    numbered_rows,
    score_labels,
    stats_of_logits,
)
from trimtab_lm.hf.models import load_language_model, with_adapters
from trimtab_lm.legacy.arguments import SFT, takes_constructor_of_2024
from trimtab_lm.legacy.constant_length import ConstantLengthDataset
from trimtab_lm.models.interface import Model, Processor, base_of, decoder_start_of
from trimtab_lm.tokens.forward import best_layout, score_tokens_in_forward
from trimtab_lm.tokens.positions import Positions

from .config import SFTConfig
from .data import Formatting, format_of, pack, text_of, tokenize_rows
from .loss import token_nll


class SFTTrainer(TrainerAdapter[SFTConfig, Tensor]):
    """Supervised fine-tuning: minimizes the mean of -log p over the tokens that count, of the whole optimizer step.

    compute_metrics, label_smoothing_factor and compute_loss_func work on whole logits, as in transformers. Without
    them, no logits of a whole batch are held in memory. Arguments of TRL 0.7 to 0.11 are taken with a FutureWarning:
    see `trimtab_lm.legacy.arguments`.

    Args:
        model: a causal or encoder-decoder model, with adapters or without, or the name of one.
        args: the config; None for the defaults.
        data_collator: instead of the padding-free one, such as DataCollatorForCompletionOnlyLM.
        train_dataset, eval_dataset: rows of texts, of `messages`, of `prompt` and `completion`, or of `input_ids` with
            or without `labels`; streams too. `SFTConfig` says what of them counts. eval_dataset may be a dict of
            several.
        processing_class: the tokenizer; None loads the one beside the model.
        peft_config: adapters to add.
        formatting_func: from a row to its text.
    """

    @takes_constructor_of_2024(SFTConfig, SFT)
    def __init__(
        self,
        model: Model | str | None = None,
        args: Any = None,
        data_collator: Callable[..., Batch] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Processor | None = None,
        model_init: Callable[..., Model] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        peft_config: PeftConfig | None = None,
        formatting_func: Formatting | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
    ):
        self.formatting_func = formatting_func
        super().__init__(
            load_language_model(model, args.model_init_kwargs),
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            peft_config=peft_config,
            data_collator=data_collator,
            callbacks=callbacks,
            optimizers=optimizers,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            compute_loss_func=compute_loss_func,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        self.is_encoder_decoder = bool(base_of(self.model).config.is_encoder_decoder)
        self.has_own_collator = data_collator is not None
        self.positions = Positions.of(self.model)
        if data_collator is None:
            eos, pad = require_eos(self.tokenizer), self.tokenizer.pad_token_id
            self.data_collator = DocumentCollator(
                eos if pad is None else pad,  # padding is masked by its place, so it may be EOS
                layout=best_layout(self.model, share_prefix=False),
                decoder_start_token_id=decoder_start_of(self.model),
                positions=self.positions,
            )
        self.prepare_datasets()

    def prepare_model(self, model: Any) -> Any:
        """The model with its adapters, and with a forward that scores tokens."""
        model = with_adapters(model, self.peft_config, self.config)
        score_tokens_in_forward(model)
        return model

    def count_items(self, batch: Batch) -> Tensor:
        """The tokens that count."""
        return count_labels(batch["labels"], is_encoder_decoder=self.is_encoder_decoder)

    def batch_loss(self, model: nn.Module, batch: Batch, items: Tensor) -> BatchLoss:
        """-sum of log p over the tokens that count, divided by their number in the whole step."""
        scores = score_labels(model, batch, policy=self.model)
        return BatchLoss(token_nll(scores.logprobs, count=items), label_stats(scores))

    # Losses and metrics of whole logits -------------------------------------------------------------------------------

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """`batch_loss`; but transformers' own loss for label smoothing, compute_loss_func, or with return_outputs.

        The outputs are the model's own, whole logits included.
        """
        if return_outputs or self._has_loss_of_logits:
            return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    @property
    def _has_loss_of_logits(self) -> bool:
        return self.label_smoother is not None or self.compute_loss_func is not None

    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        """The loss, and logits and labels where they are asked for."""
        if prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only)
        inputs = self.without_repetitions(inputs, self.real_rows())
        loss, logits, labels = Trainer.prediction_step(self, model, inputs, prediction_loss_only, ignore_keys)
        if not self._has_loss_of_logits:
            stats = stats_of_logits(logits, labels, is_encoder_decoder=self.is_encoder_decoder)  # type: ignore[arg-type]
            self.recorder.add(stats, training=False)
        return loss, logits, labels

    # Data -------------------------------------------------------------------------------------------------------------

    def without_repetitions(self, batch: Batch, real_rows: int | None) -> Batch:
        """A batch in which only labels of the first `real_rows` rows count."""
        return labels_of_real_rows(batch, real_rows)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Batches for evaluation; a dataset that was not given to the constructor is prepared here."""
        with self._evaluation_collator(is_row_by_row=self.compute_metrics is not None):
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Batches for `predict`, in which each row of the dataset is a row of its own."""
        with self._evaluation_collator(is_row_by_row=True):
            return super().get_test_dataloader(test_dataset)

    @contextmanager
    def _evaluation_collator(self, *, is_row_by_row: bool) -> Iterator[None]:
        """The collator of data loaders that are built inside the block.

        Row by row, logits go with the labels of their row. Over several processes, positions name their rows.
        """
        collator = self.data_collator
        if is_row_by_row and isinstance(collator, DocumentCollator) and collator.layout == "packed":
            self.data_collator = DocumentCollator(collator.pad_token_id, layout="padded")
        if isinstance(collator, DocumentCollator) and self.accelerator.num_processes > 1:
            self.data_collator = numbered_rows(self.data_collator)
        try:
            yield
        finally:
            self.data_collator = collator

    def tokenize_dataset(self, dataset: Any, use: Use) -> Any:
        """The dataset as `input_ids` and `labels`, packed where the config asks for it; never packed for `predict`."""
        config = self.config
        options = config.dataset_kwargs or {}
        if options.get("skip_prepare_dataset") or isinstance(dataset, ConstantLengthDataset):
            return dataset
        packing = {"train": config.packing, "eval": config.eval_packing, "test": False}[use]
        if packing and self.is_encoder_decoder:
            raise ValueError(
                "packing puts documents side by side, which an encoder-decoder model cannot read. Leave it out."
            )
        if packing and config.packing_strategy == "constant_length":
            return self._of_constant_length(dataset)
        rows = tokenize_rows(
            dataset,
            self.tokenizer,
            config,
            formatting_func=self.formatting_func,
            is_encoder_decoder=self.is_encoder_decoder,
            with_labels=not self.has_own_collator,
            positions=self.positions,
        )
        return pack(rows, config) if packing else rows

    def _of_constant_length(self, dataset: Any) -> Any:
        config = self.config
        options = {
            name: value for name, value in (config.dataset_kwargs or {}).items() if name != "skip_prepare_dataset"
        }
        if format_of(columns_of(dataset), config, self.formatting_func) is RowFormat.TEXT:
            options["formatting_func"] = text_of(dataset, config, self.formatting_func)
        else:  # ids that a format's own rules give, with the tokens that count
            dataset = tokenize_rows(dataset, self.tokenizer, config, is_cut=False)
        rows = ConstantLengthDataset(
            self.tokenizer,
            dataset,
            infinite=bool(config.infinite),
            seq_length=config.max_length or 0,
            num_of_sequences=config.num_of_sequences,
            chars_per_token=config.chars_per_token,
            seed=config.seed,
            **options,
        )
        is_stream = config.infinite or not isinstance(dataset, Dataset)
        return rows if is_stream else Dataset.from_list([{k: v.tolist() for k, v in row.items()} for row in rows])
