"""Supervised fine-tuning on transformers.Trainer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
from datasets import Dataset
from peft import PeftConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from trimtab_common.stats import Mean
from trimtab_lm.data.collator import DocumentCollator
from trimtab_lm.data.formats import RowFormat, columns_of
from trimtab_lm.data.tokenization import require_eos
from trimtab_lm.hf.checkpoints import CheckpointedTrainer
from trimtab_lm.hf.support import (
    Recorder,
    device_share,
    load_language_model,
    load_processing_class,
    numbered_rows,
    own_arguments,
    prepare_trackers,
    require_finite,
    stats_of_logits,
    window_total,
    with_adapters,
    with_decoder_inputs,
    without_repetitions,
)
from trimtab_lm.legacy.arguments import SFT, takes_constructor_of_2024
from trimtab_lm.legacy.constant_length import ConstantLengthDataset
from trimtab_lm.tokens.forward import base_of, best_layout, score_tokens_in_forward
from trimtab_lm.tokens.layout import from_labels, token_columns
from trimtab_lm.tokens.positions import Positions

from .config import SFTConfig
from .data import Formatting, format_of, pack, text_of, tokenize_rows
from .loss import token_nll


class SFTTrainer(CheckpointedTrainer):
    """Supervised fine-tuning: minimizes the mean of -log p over the tokens that count, of the whole optimizer step.

    model: a causal or encoder-decoder model, with adapters or without, or the name of one.
    train_dataset, eval_dataset (or a dict of several): rows of texts, of `messages`, of `prompt` and `completion`, of
        `input_ids` with or without `labels`, streams too; `SFTConfig` says what of them counts.
    formatting_func: from a row to its text. peft_config: adapters to add. data_collator: instead of the padding-free
        one, such as DataCollatorForCompletionOnlyLM.

    compute_metrics, label_smoothing_factor and compute_loss_func work on whole logits, as in transformers; without
    them no logits of a whole batch are ever held. What was an argument of 2024's constructor is taken with a
    FutureWarning: see `trimtab_lm.legacy.arguments`.
    """

    loss_is_scaled_for_ga = True  # compute_loss divides by the tokens of the whole optimizer step

    @takes_constructor_of_2024(SFTConfig, SFT)
    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Callable[..., Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        peft_config: PeftConfig | None = None,
        formatting_func: Formatting | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
    ):
        args = own_arguments(args, train_dataset)
        processing_class = load_processing_class(processing_class, model)
        self._config: SFTConfig = args
        self.formatting_func, self.peft_config = formatting_func, peft_config
        self.recorder = Recorder()
        if model is not None:
            model = self._made_trainable(load_language_model(model, args.model_init_kwargs), args)
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            model_init=model_init,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            compute_loss_func=compute_loss_func,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
        )
        prepare_trackers(args)
        self.tokenizer = getattr(processing_class, "tokenizer", processing_class)
        self.is_encoder_decoder = bool(base_of(self.model).config.is_encoder_decoder)
        self.has_own_collator = data_collator is not None
        self.positions = Positions.of(self.model)
        if data_collator is None:
            eos, pad = require_eos(self.tokenizer), self.tokenizer.pad_token_id
            self.data_collator = DocumentCollator(
                eos if pad is None else pad,  # what pads is masked by its place: it may be EOS
                layout=best_layout(self.model, share_prefix=False),
                decoder_start_token_id=getattr(base_of(self.model).config, "decoder_start_token_id", None),
                positions=self.positions,
            )
        with args.main_process_first(desc="tokenizing"):
            self.train_dataset = self._prepared(train_dataset, packing=args.packing)
            sets = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
            prepared = {name: self._prepared(one, packing=args.eval_packing) for name, one in sets.items()}
            self.eval_dataset = prepared if isinstance(eval_dataset, dict) else prepared[""]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """-sum of log p over the tokens that count, over their number in the whole step (or in this batch).

        With return_outputs the model's own outputs come with it, whole logits included.
        """
        if return_outputs or self.label_smoother is not None or self.compute_loss_func is not None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        found = from_labels(inputs["labels"], is_encoder_decoder=self.is_encoder_decoder)
        scores = model(tokens=token_columns(with_decoder_inputs(self.model, inputs)) | found)
        stats = {"entropy": Mean.of(scores.entropy), "loss": Mean.of(-scores.logprobs)}
        self.recorder.add(stats, training=model.training)
        if num_items_in_batch is None:
            return token_nll(scores.logprobs, count=max(len(scores.logprobs), 1))
        return token_nll(scores.logprobs, count=num_items_in_batch) * device_share(self)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The micro-batches of an optimizer step, and how many of their tokens count, over all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        skipped = 0 if self.is_encoder_decoder else 1  # nothing predicts a row's first token
        total = window_total(self, [(batch["labels"][:, skipped:] != -100).sum() for batch in batches])
        return batches, total.clamp(min=1)  # where no token counts the loss is 0, and not 0 / 0

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward of a micro-batch; TrainingDivergedError before a loss that is not finite can train."""
        return require_finite(super().training_step(model, inputs, num_items_in_batch), self)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The loss, and logits and labels where they are asked for."""
        inputs = without_repetitions(self, inputs)
        if not prediction_loss_only:
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            if self.label_smoother is None and self.compute_loss_func is None:
                stats = stats_of_logits(logits, labels, is_encoder_decoder=self.is_encoder_decoder)  # type: ignore[arg-type]
                self.recorder.add(stats, training=False)
            return loss, logits, labels
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """As in transformers; the loss is the mean over all tokens that count, not over batches."""
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        assert output.metrics is not None
        output.metrics.update(self.recorder.flush(training=False, prefix=f"{metric_key_prefix}_"))
        return output

    def hyperparameter_search(
        self, hp_space: Any = None, compute_objective: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As in transformers, whose objective would be a sum of all statistics; here it is the evaluation's loss."""
        objective = compute_objective or itemgetter("eval_loss")
        return super().hyperparameter_search(hp_space, objective, *args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with what was recorded since the last time."""
        if "loss" in logs:
            logs = self.recorder.flush(training=True) | logs
        super().log(logs, start_time)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Batches for evaluation; a data set that was not given to the constructor is tokenized here."""
        known = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        is_new = not (eval_dataset is None or isinstance(eval_dataset, str) or any(eval_dataset is k for k in known))
        if is_new:
            eval_dataset = self._prepared(eval_dataset, packing=self._config.eval_packing)
        with self._row_by_row(self.compute_metrics is not None):
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Batches for `predict`, each row of the data set a row of its own."""
        with self._row_by_row(True):
            return super().get_test_dataloader(self._prepared(test_dataset, packing=False))

    def call_model_init(self, trial: Any = None) -> Any:
        """A new model from `model_init`, with adapters where they are asked for."""
        return self._made_trainable(super().call_model_init(trial), self.args)

    def _made_trainable(self, model: Any, args: Any) -> Any:
        model = with_adapters(model, self.peft_config, args)
        score_tokens_in_forward(model)
        return model

    def _prepared(self, dataset: Any, *, packing: bool | None) -> Any:
        """The data set as `input_ids` and `labels`, packed where that is asked for."""
        config = self._config
        given = config.dataset_kwargs or {}
        if dataset is None or given.get("skip_prepare_dataset") or isinstance(dataset, ConstantLengthDataset):
            return dataset
        if packing and self.is_encoder_decoder:
            raise ValueError(
                "packing puts documents side by side, which an encoder-decoder model cannot read. Leave it out."
            )
        if packing and config.packing_strategy == "constant_length":
            return self._of_constant_length(dataset, config)
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

    def _of_constant_length(self, dataset: Any, config: SFTConfig) -> Any:
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

    @contextmanager
    def _row_by_row(self, is_wanted: bool) -> Iterator[None]:
        """Batches made inside the block have one padded row per row: their logits go with their labels."""
        own = self.data_collator
        if is_wanted and isinstance(own, DocumentCollator) and own.layout == "packed":
            self.data_collator = DocumentCollator(own.pad_token_id, layout="padded")
        if isinstance(own, DocumentCollator) and self.accelerator.num_processes > 1:
            self.data_collator = numbered_rows(self.data_collator)
        try:
            yield
        finally:
            self.data_collator = own
