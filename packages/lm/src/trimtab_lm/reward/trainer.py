"""Training a reward model on pairs of answers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from operator import itemgetter
from typing import Any

import torch
from datasets import IterableDataset
from peft import PeftConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import EvalPrediction, TrainerCallback

from trimtab_lm.hf.checkpoints import CheckpointedTrainer
from trimtab_lm.hf.support import (
    Recorder,
    Tables,
    device_share,
    load_processing_class,
    own_arguments,
    prepare_trackers,
    require_finite,
    window_total,
    with_adapters,
)
from trimtab_lm.legacy.arguments import REWARD, takes_constructor_of_2024
from trimtab_lm.tokens.forward import base_of, best_layout, score_sequences_in_forward
from trimtab_lm.tokens.layout import token_columns
from trimtab_lm.tokens.positions import Positions

from .collator import PairCollator, RewardDataCollatorWithPadding, pair_rows, sequences
from .config import RewardConfig
from .data import prepare_pairs
from .loss import accuracy, calibration, centering, pair_loss
from .model import (
    check_padding,
    dropout_rates_at_zero,
    for_scores,
    init_head,
    load_scorer,
    require_scorer,
    require_trained_head,
    turn_off_missing_checkpointing,
    with_padding,
)


class RewardTrainer(CheckpointedTrainer):
    """Trains a sequence classifier with one label to score the chosen answer of each pair above the rejected one.

    model: an `AutoModelForSequenceClassification` with num_labels=1, with adapters or without, or the name of one; a
        language model's name gets a new head. Decoders are scored at the last real token, also where padding is EOS.
        With several labels each is trained as a score of its own, with a warning: losses and scores are means over
        labels.
    data_collator: one that gives what `RewardDataCollatorWithPadding` does, instead of the padding-free one, in which
        the prompt of a pair is read once.
    train_dataset, eval_dataset (or a dict of several), streams too: rows of `prompt`, `chosen` and `rejected`, or of
        the last two with the prompt in both, texts or conversations; or pre-tokenized, `input_ids_chosen`,
        `attention_mask_chosen` and the same of rejected. `margin`: by how much the scores of a pair have to differ.
    compute_metrics: gets the scores of chosen and rejected as predictions [N, 2], and as label_ids [N] which column is
        the better one, 0.
    peft_config: adapters to train, and the score head with them.

    Logged beside the loss, in training and evaluation: accuracy (a tie is not a win), the means scores/margin (of
    chosen - rejected), scores/chosen and scores/rejected, and calibration_error. Each evaluation puts
    `num_eval_samples` pairs with their scores into a table of the trackers.
    """

    loss_is_scaled_for_ga = True  # compute_loss divides by the pairs of the whole optimizer step

    @takes_constructor_of_2024(RewardConfig, REWARD)
    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Callable[..., Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        peft_config: PeftConfig | None = None,
    ):
        if model is None and (model_init is None or processing_class is None):
            raise ValueError("RewardTrainer needs a model, or model_init and processing_class=tokenizer.")
        self._keeps_columns = not args.remove_unused_columns
        sets = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
        streams = [one for one in (train_dataset, *sets.values()) if isinstance(one, IterableDataset)]
        args = own_arguments(args, streams[0] if streams else train_dataset)
        self._config: RewardConfig = args
        processing_class, self.tokenizer = with_padding(load_processing_class(processing_class, model))
        self.peft_config = peft_config
        if model is not None:
            model = self._as_scorer(load_scorer(model, args.model_init_kwargs), args)
        self.recorder, self.tables = Recorder(), Tables()
        self._samples: list[list[Any]] = []
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
        )
        prepare_trackers(args)
        if data_collator is None and self.scores_in_forward:
            layout = best_layout(self.model, share_prefix=True)
            self.data_collator = PairCollator(self.tokenizer.pad_token_id, layout)
        elif data_collator is None:
            self.data_collator = RewardDataCollatorWithPadding(self.tokenizer)
        with args.main_process_first(desc="tokenizing"):
            self.train_dataset = self._prepared(train_dataset)
            prepared = {name: self._prepared(one) for name, one in sets.items()}
            self.eval_dataset = prepared if isinstance(eval_dataset, dict) else prepared[""]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The sum of -log s(chosen - rejected - margin) over the pairs in the whole step; in evaluation the mean.

        With return_outputs also `scores` [B, 2], of chosen and rejected, and `losses` [B].
        """
        rows = self._rows(inputs)
        if self.scores_in_forward:
            logits = model(tokens=token_columns(rows))
        else:
            logits = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"]).logits
        # [labels, 2, B], of which almost every model has one label: each is a score of its own.
        labels = logits.reshape(-1, 2, base_of(self.model).config.num_labels).permute(2, 1, 0)
        losses = torch.stack([self._losses(*label, margin=rows.get("margin")) for label in labels]).mean(0)
        chosen, rejected = scores = labels.mean(0)
        if model.training:
            self._record(chosen, rejected, losses, training=True)
        if num_items_in_batch is None:
            loss = losses.mean()
        else:
            loss = losses.sum() / num_items_in_batch * device_share(self)
        return (loss, {"scores": scores.T, "losses": losses}) if return_outputs else loss

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The micro-batches of an optimizer step, and how many pairs they hold, over all processes."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        batches = [self._rows(batch) for batch in batches]
        return batches, window_total(self, [len(batch["ends"]) // 2 for batch in batches])

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward of a micro-batch; TrainingDivergedError before a loss that is not finite can train."""
        with dropout_rates_at_zero(model) if self._config.disable_dropout else nullcontext():
            return require_finite(super().training_step(model, inputs, num_items_in_batch), self)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The mean loss, the scores [B, 2] and the better column [B]."""
        rows = self._rows(self._prepare_inputs(inputs))
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, rows, return_outputs=True)
        scores = outputs["scores"]
        # Without the rows that repeat themselves to fill the last batch of each process.
        columns = self.accelerator.gather_for_metrics(torch.cat([scores, outputs["losses"][:, None]], 1))
        self._record(*columns.unbind(1), training=False)
        self._keep_samples(rows, scores)
        if prediction_loss_only:
            return loss, None, None
        return loss, scores, torch.zeros(len(scores), dtype=torch.long, device=scores.device)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """As in transformers, with the statistics over all pairs, not over batches, and a table of samples."""
        self._samples = []
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        assert output.metrics is not None
        for name, value in self._statistics(training=False).items():
            if name == "loss":
                output.metrics[f"{metric_key_prefix}_loss"] = value
            else:  # compute_metrics may have its own
                output.metrics.setdefault(f"{metric_key_prefix}_{name}", value)
        if self._samples:
            columns = ("chosen", "rejected", "score of chosen", "score of rejected")
            self.tables.add(self, f"{metric_key_prefix}_pairs", columns, self._samples)
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
            logs = self._statistics(training=True) | logs
        super().log(logs, start_time)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Batches for evaluation; a data set that was not given to the constructor is tokenized here."""
        known = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        is_known = eval_dataset is None or isinstance(eval_dataset, str) or any(eval_dataset is one for one in known)
        return super().get_eval_dataloader(eval_dataset if is_known else self._prepared(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """Batches for `predict`."""
        return super().get_test_dataloader(self._prepared(test_dataset))

    def call_model_init(self, trial: Any = None) -> Any:
        """A new scorer from `model_init`, with adapters where they are asked for."""
        return self._as_scorer(super().call_model_init(trial), self.args)

    def _as_scorer(self, model: Any, args: Any) -> Any:
        """The model as it is trained; `args`, our own copy, loses what it cannot do."""
        require_scorer(model, self.tokenizer)
        turn_off_missing_checkpointing(model, args)
        if args.init_reward_head:
            init_head(base_of(model), args.seed)
        model = with_adapters(model, for_scores(self.peft_config, model), args)
        require_trained_head(model)
        self.scores_in_forward = score_sequences_in_forward(model)
        check_padding(self.tokenizer, model, self.scores_in_forward)
        return model

    def _prepared(self, dataset: Any) -> Any:
        if dataset is None:
            return None
        options: dict[str, Any] = {"keeps_columns": self._keeps_columns, "positions": Positions.of(self.model)}
        return prepare_pairs(dataset, self.tokenizer, self._config, **options)

    def _losses(self, chosen: Tensor, rejected: Tensor, *, margin: Tensor | None) -> Tensor:
        """The losses [B] of pairs, from the scores [B] of their two answers."""
        losses = pair_loss(chosen, rejected, margin=margin)
        if self._config.center_rewards_coefficient is not None:
            losses = losses + self._config.center_rewards_coefficient * centering(chosen, rejected)
        return losses

    def _rows(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        pad, side = self.tokenizer.pad_token_id, self.tokenizer.padding_side
        return pair_rows(batch, pad_token_id=pad, padding_side=side)

    def _record(self, chosen: Tensor, rejected: Tensor, losses: Tensor, *, training: bool) -> None:
        columns = {"chosen": chosen, "rejected": rejected, "loss": losses}
        self.recorder.add({name: column.detach() for name, column in columns.items()}, training=training)

    def _statistics(self, *, training: bool) -> dict[str, float]:
        """Of all pairs since the last time, on all processes."""
        columns: dict[str, Any] = self.recorder.flush(training=training)
        if not columns:
            return {}
        chosen, rejected = columns["chosen"], columns["rejected"]
        means: dict[str, Tensor] = {
            "accuracy": accuracy(chosen, rejected),
            "scores/margin": chosen - rejected,
            "scores/chosen": chosen,
            "scores/rejected": rejected,
            "loss": columns["loss"],
        }
        found = {name: float(values.double().mean()) for name, values in means.items()}
        return found | {"calibration_error": float(calibration(chosen, rejected))}

    def _keep_samples(self, rows: dict[str, Tensor], scores: Tensor) -> None:
        missing = self._config.num_eval_samples - len(self._samples)
        if missing <= 0 or not self.is_world_process_zero():
            return
        texts = [self.tokenizer.decode(ids) for ids in sequences(rows, 2 * missing)]
        pairs = zip(texts[::2], texts[1::2], scores.tolist(), strict=False)
        self._samples += [[chosen, rejected, *values] for chosen, rejected, values in pairs]
