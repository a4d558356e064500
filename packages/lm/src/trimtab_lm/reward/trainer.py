"""Training a reward model on pairs of answers."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from peft import PeftConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, TrainerCallback

from trimtab_common.compat.noise import expecting_new_head
from trimtab_common.overrides import replaced
from trimtab_lm.hf.adapter import (
    REAL_ROWS,
    BatchLoss,
    DataOptions,
    TrainerAdapter,
    TrainerOptions,
    layout_of,
    prepare_datasets,
)
from trimtab_lm.hf.models import load_language_model, with_adapters
from trimtab_lm.hf.types import Batch, ComputeMetrics, DataSource, EvalSource, Optimizers, Prediction, Use
from trimtab_lm.interface import Model, Processor, base_of
from trimtab_lm.legacy.arguments import REWARD, takes_constructor_of_2024
from trimtab_lm.tokens.dropout import without_dropout
from trimtab_lm.tokens.forward import score_sequences_in_forward
from trimtab_lm.tokens.positions import Positions

from .algorithm import compare, score
from .collator import PairCollator, RewardDataCollatorWithPadding, pair_rows
from .config import RewardConfig
from .data import prepare_pairs
from .evaluation import PairTable, pair_statistics
from .model import (
    check_padding,
    for_scores,
    init_head,
    require_scorer,
    require_trained_head,
    turn_off_missing_checkpointing,
    with_padding,
)


class RewardTrainer(TrainerAdapter[RewardConfig, Tensor]):
    """Trains a sequence classifier with one label to score the chosen answer of each pair above the rejected one.

    In training and evaluation it logs, besides the loss, accuracy (a tie is not a win), the means scores/margin (of
    chosen - rejected), scores/chosen and scores/rejected, and calibration_error. Each evaluation puts
    `num_eval_samples` pairs with their scores into a table of the trackers.

    Args:
        model: an `AutoModelForSequenceClassification` with num_labels=1, with adapters or without, or the name of one;
            a language model's name gets a new head. Decoders are scored at the last real token, also where padding is
            EOS. With several labels, each label is trained as a separate score, with a warning, and losses and scores
            are averaged over labels.
        args: the config; None for the defaults.
        data_collator: one that returns what `RewardDataCollatorWithPadding` does, instead of the padding-free one,
            which reads the prompt of a pair once.
        train_dataset: rows of `prompt`, `chosen` and `rejected`, or of the last two with the prompt in both, texts or
            conversations; or pre-tokenized, `input_ids_chosen`, `attention_mask_chosen` and the same of rejected.
            `margin`: by how much the scores of a pair have to differ. Streams too, and both of torch, whose rows a
            data_collator gets as they are.
        eval_dataset: such rows too, or a dict of several datasets.
        processing_class: the tokenizer; by default the one saved with the model.
        compute_metrics: gets the scores of chosen and rejected as predictions [N, 2], and as label_ids [N] which column
            is the better one, 0.
        peft_config: adapters to train, and the score head with them.
    """

    method, paper = "the Bradley-Terry loss of a reward model", "Ouyang et al. 2022, arXiv:2203.02155"
    watched = ("loss", "accuracy", "scores/margin", "calibration_error", "grad_norm")

    @takes_constructor_of_2024(RewardConfig, REWARD)
    def __init__(
        self,
        model: Model | str | None = None,
        args: RewardConfig | None = None,
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
    ):
        assert args is not None  # takes_constructor_of_2024 fills it in
        self.samples = PairTable(args.num_eval_samples)
        self.trains_without_dropout = args.disable_dropout
        data = DataOptions(train_dataset=train_dataset, eval_dataset=eval_dataset, data_collator=data_collator)
        hooks = TrainerOptions(callbacks=callbacks, optimizers=optimizers, compute_metrics=compute_metrics)
        hooks["preprocess_logits_for_metrics"] = preprocess_logits_for_metrics
        with expecting_new_head():
            kind = AutoModelForSequenceClassification
            # The score head trains beside adapters, so that the model loads as where all weights train.
            scorer = load_language_model(model, args.model_init_kwargs, None, kind, num_labels=1)
        super().__init__(scorer, args, processing_class, model_init, peft_config, data=data, **hooks)
        if data_collator is None and self.scores_in_forward:
            self.data_collator = PairCollator(self.tokenizer.pad_token_id, **layout_of(self))
        elif data_collator is None:
            self.data_collator = RewardDataCollatorWithPadding(self.tokenizer)
        prepare_datasets(self)

    def load_processing_class(self, processing_class: Processor | None, model: Model) -> Processor:
        """The processing class with a padding token."""
        return with_padding(super().load_processing_class(processing_class, model))

    def prepare_model(self, model: Model) -> Model:
        """The model as a scorer, with its adapters; `config`, our own copy, loses what the model cannot do."""
        require_scorer(model, self.tokenizer)
        turn_off_missing_checkpointing(model, self.config)
        if self.config.init_reward_head:
            init_head(base_of(model), self.config.seed)
        model = with_adapters(model, for_scores(self.peft_config, model), self.config)
        require_trained_head(model)
        self.scores_in_forward = score_sequences_in_forward(model)
        check_padding(self.tokenizer, model)
        return model

    def tokenize_dataset(self, dataset: DataSource, use: Use) -> DataSource:
        """The dataset as pairs of token ids; rows of a torch dataset for a collator of the caller's as they are."""
        if self.has_own_collator and not isinstance(dataset, Dataset | IterableDataset):
            return dataset
        positions = Positions.of(self.model)
        return prepare_pairs(
            dataset, self.tokenizer, self.config, keeps_columns=self.keeps_columns, positions=positions
        )

    @property
    def has_own_loss(self) -> bool:
        """Whether a replaced method reads the columns of a batch that 2024 documents."""
        return bool(replaced(self, RewardTrainer, "compute_loss", "training_step", "prediction_step"))

    @property
    def data_collator(self) -> Any:
        """The caller's collator, or else the one whose batches the loss reads."""
        if isinstance(self._collator, PairCollator) and self.has_own_loss:
            return RewardDataCollatorWithPadding(self.tokenizer)
        return self._collator

    @data_collator.setter
    def data_collator(self, collator: Callable[..., Batch]) -> None:
        self._collator = collator

    def micro_batches(self, batches: list[Batch]) -> list[Batch]:
        """The batches with their sequences in rows, whatever collator made them; as they are for a replaced method."""
        return batches if self.has_own_loss else [self._rows(batch) for batch in batches]

    def count_items(self, batch: Batch) -> int:
        """The pairs."""
        return len(self._rows(batch)["ends"]) // 2

    def batch_loss(self, model: nn.Module, batch: Batch, items: Tensor) -> BatchLoss:
        """The sum of -log s(chosen - rejected - margin), divided by the pairs of the whole step.

        The outputs are `scores` [B, 2], of chosen and rejected, also as `predictions`; `losses` [B]; and `labels` [B].
        """
        rows = self._rows(batch)
        logits, router_loss = score(model, rows, reads_tokens=self.scores_in_forward)
        center = self.config.center_rewards_coefficient
        pairs = compare(logits, margin=rows.get("margin"), center=center)
        losses, real = pairs.losses + router_loss, batch.get(REAL_ROWS)
        chosen, rejected = pairs.scores.unbind(1)
        columns = {"chosen": chosen, "rejected": rejected, "loss": losses}
        stats = {name: column[:real].detach() for name, column in columns.items()}
        better = torch.zeros(len(losses), dtype=torch.long, device=losses.device)
        outputs = {"scores": pairs.scores, "losses": losses, "predictions": pairs.scores, "labels": better}
        outputs |= {"rewards_chosen": pairs.by_label[:, 0].T, "rewards_rejected": pairs.by_label[:, 1].T}  # of 2024
        return BatchLoss(losses.sum() / items, stats, outputs)

    def _rows(self, batch: Batch) -> dict[str, Tensor]:
        pad, side = self.tokenizer.pad_token_id, self.tokenizer.padding_side
        return pair_rows(batch, pad_token_id=pad, padding_side=side)

    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Prediction:
        """The mean loss, the scores [B, 2] and the better column [B]; the first pairs are kept for the table."""
        loss, scores, better = super().prediction_step(model, inputs, False, ignore_keys)
        if scores is not None and self.is_world_process_zero():
            self.samples.add(self._rows(inputs), scores, self.tokenizer)
        return (loss, None, None) if prediction_loss_only else (loss, scores, better)

    def statistics(self, *, training: bool) -> dict[str, float]:
        """Of all pairs since the last time, on all processes."""
        return pair_statistics(self.recorder.flush(training=training))

    def begin_evaluation(self) -> None:
        """Forget what an evaluation that failed has recorded, its pairs included."""
        super().begin_evaluation()
        self.samples.rows = []

    def log_samples(self, dataloader: DataLoader[Batch], prefix: str) -> None:
        """A table of pairs with their scores, by `visualize_samples`."""
        self.samples.name = f"{prefix}_pairs"
        if self.samples.rows:
            self.visualize_samples(self.config.num_eval_samples)
        self.samples.rows = []

    def visualize_samples(self, num_print_samples: int) -> None:
        """Puts pairs of the evaluation set with their scores into a table of the trackers; every evaluation calls it.

        Args:
            num_print_samples: rows of the table; -1: all pairs.
        """
        most = sys.maxsize if num_print_samples < 0 else num_print_samples
        if self.samples.rows:
            self.samples.show(self, self.tables, most)
            return
        try:
            with self.samples.at_most(most), without_dropout(self.model):
                pairs = 0
                for batch in self.get_eval_dataloader():
                    if pairs >= most:
                        break
                    self.prediction_step(self.model, batch, False)
                    pairs += self.count_items(batch)
                self.samples.show(self, self.tables, most)
        finally:
            self.recorder.drop(training=False)
