"""Supervised fine-tuning on transformers.Trainer."""

from collections.abc import Callable
from typing import Any

from datasets import Dataset, IterableDataset
from peft import PeftConfig
from torch import Tensor, nn
from transformers import TrainerCallback

from trimtab_lm.data.tokenization import require_eos
from trimtab_lm.hf.adapter import BatchLoss, DataOptions, TrainerOptions, prepare_datasets
from trimtab_lm.hf.labels import LabelTrainer, document_collator, label_stats
from trimtab_lm.hf.models import load_language_model
from trimtab_lm.hf.types import Batch, ComputeMetrics, DataSource, EvalSource, OptimizerChoice, Optimizers, Use
from trimtab_lm.interface import Model, Processor
from trimtab_lm.legacy.arguments import SFT, takes_constructor_of_2024
from trimtab_lm.legacy.constant_length import ConstantLengthDataset
from trimtab_lm.tokens.positions import Positions

from .algorithm import score_labels, token_nll
from .config import SFTConfig
from .data import Formatting, PackedDataset, pack, rows_of_constant_length, tokenize_rows


class SFTTrainer(LabelTrainer[SFTConfig]):
    """Supervised fine-tuning: minimizes the mean of -log p over the tokens that count, of the whole optimizer step.

    compute_metrics, label_smoothing_factor and compute_loss_func work on whole logits, as in transformers. Without
    them, no logits of a whole batch are held in memory. Arguments of TRL 0.7 to 0.11 are taken with a FutureWarning:
    see `trimtab_lm.legacy.arguments`.

    Args:
        model: a causal or encoder-decoder model, with adapters or without, or the name of one.
        args: the config; None for the defaults.
        data_collator: instead of the padding-free one, such as DataCollatorForCompletionOnlyLM.
        train_dataset: rows of texts, of `messages`, of `prompt` and `completion`, or of `input_ids` with or without
            `labels`. Streams and torch datasets too; a data_collator gets the rows of a torch dataset unchanged.
            `SFTConfig` says which tokens count.
        eval_dataset: such rows too, or a dict of several datasets.
        processing_class: the tokenizer; by default the one saved with the model.
        peft_config: adapters to add.
        formatting_func: from a row to its text.
    """

    method, paper = "supervised fine-tuning", "Ouyang et al. 2022, arXiv:2203.02155"
    watched = ("loss", "entropy", "grad_norm", "learning_rate", "epoch")

    @takes_constructor_of_2024(SFTConfig, SFT)
    def __init__(
        self,
        model: Model | str | None = None,
        args: SFTConfig | None = None,
        data_collator: Callable[..., Batch] | None = None,
        train_dataset: DataSource | None = None,
        eval_dataset: EvalSource | None = None,
        processing_class: Processor | None = None,
        model_init: Callable[..., Model] | None = None,
        compute_metrics: ComputeMetrics | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: Optimizers = (None, None),
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        peft_config: PeftConfig | None = None,
        formatting_func: Formatting | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        optimizer_cls_and_kwargs: OptimizerChoice | None = None,
    ):
        assert args is not None  # takes_constructor_of_2024 fills it in
        self.formatting_func = formatting_func
        data = DataOptions(train_dataset=train_dataset, eval_dataset=eval_dataset, data_collator=data_collator)
        hooks = TrainerOptions(callbacks=callbacks, optimizers=optimizers, compute_metrics=compute_metrics)
        hooks["preprocess_logits_for_metrics"] = preprocess_logits_for_metrics
        hooks["compute_loss_func"] = compute_loss_func
        hooks["optimizer_cls_and_kwargs"] = optimizer_cls_and_kwargs
        language_model = load_language_model(model, args.model_init_kwargs, peft_config)
        super().__init__(language_model, args, processing_class, model_init, peft_config, data=data, **hooks)
        if data_collator is None:
            require_eos(self.tokenizer)
            self.data_collator = document_collator(self)
        prepare_datasets(self)

    def batch_loss(self, model: nn.Module, batch: Batch, items: Tensor) -> BatchLoss:
        """-sum of log p over the tokens that count, each with a router's loss, over their number in the whole step."""
        scores = score_labels(model, batch, policy=self.model)
        return BatchLoss(token_nll(scores, count=items), label_stats(scores))

    def tokenize_dataset(self, dataset: DataSource, use: Use) -> DataSource:
        """The dataset as `input_ids` and `labels`, packed where the config asks for it.

        Never packed for `predict` and `compute_metrics`, whose logits and labels have a row for each of the dataset's.
        """
        config = self.config
        options = config.dataset_kwargs or {}
        is_callers = self.has_own_collator and not isinstance(dataset, Dataset | IterableDataset)
        if options.get("skip_prepare_dataset") or isinstance(dataset, ConstantLengthDataset) or is_callers:
            return dataset
        packing = {
            "train": config.packing,
            "eval": config.eval_packing and self.compute_metrics is None,
            "test": False,
        }[use]
        if packing and self.is_encoder_decoder:
            raise ValueError(
                "packing puts documents side by side, which an encoder-decoder model cannot read. Leave it out."
            )
        if packing and config.packing_strategy == "constant_length":
            infinite = use == "train" and bool(config.infinite)  # an evaluation has to end
            read = self.formatting_func
            return rows_of_constant_length(dataset, self.tokenizer, config, formatting_func=read, infinite=infinite)
        if packing and self.has_own_collator:
            raise ValueError(
                "packing=True puts several documents into a row, and a data_collator came, which does not keep them "
                "apart. Leave the data_collator out, or set packing_strategy='constant_length'."
            )
        rows = tokenize_rows(
            dataset,
            self.tokenizer,
            config,
            formatting_func=self.formatting_func,
            is_encoder_decoder=self.is_encoder_decoder,
            with_labels=not self.has_own_collator,
            positions=Positions.of(self.model),
        )
        return pack(rows, config) if packing else rows

    def rows_of_run(self) -> DataSource | None:
        """The rows before they are packed."""
        rows: Any = self.train_dataset
        return rows.dataset if isinstance(rows, PackedDataset | ConstantLengthDataset) else rows
