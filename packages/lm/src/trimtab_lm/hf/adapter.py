"""The one class between `transformers.Trainer` and our trainers: it knows no algorithm, and uses documented hooks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from pathlib import Path
from typing import Any, Generic, TypeVar, Unpack, cast

import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from peft import PeftConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import set_seed
from transformers.trainer_utils import BestRun, EvalLoopOutput, TrainOutput

from trimtab_common.health import TrainingDivergedError
from trimtab_common.runs import RunRecord, layout_fingerprint, rows_fingerprint
from trimtab_common.sharding import full_state_dicts, reshard
from trimtab_lm.data.media import check_features
from trimtab_lm.interface import Model, Processor, check_generation_config, tokenizer_of
from trimtab_lm.tokens.dropout import dropout_rates_at_zero, has_dropout

from .checkpoints import WITHOUT_EFFECT, Checkpoints
from .config import Config, for_own_collators
from .hooks import HooksOf2024
from .interruption import EndsBySignal
from .models import load_processing_class, prepare_sharding
from .streams import Passes, check_batches, check_evaluated
from .tracking import MetricsFile, Recorder, Tables, prepare_trackers
from .types import Batch, BatchLoss, DataOptions, DataSource, Prediction, TrainerOptions, Trial, Use

Items = TypeVar("Items")
"""What the loss of a step divides by: a number of tokens or pairs."""

REAL_ROWS = "real_rows"
"""In a batch of an evaluation: how many of its rows are real, see `TrainerAdapter.real_rows`."""


class TrainerAdapter(HooksOf2024, Generic[Config, Items]):
    """`transformers.Trainer` for losses that are means over the items of an optimizer step, such as tokens or pairs.

    A subclass supplies `prepare_model`, `tokenize_dataset`, `count_items` and `batch_loss`. The adapter gives it

    - exact division of the loss by the items of all micro-batches and processes,
    - evaluation in which each row counts once, however the processes' last batches are filled,
    - statistics as means over all that was recorded, in the log and in the metrics,
    - an error before a loss that is not finite moves a weight,
    - dropout off until the end of backward, for trainers that ask for it,
    - sealed checkpoints of one run in a folder: `resume_from_checkpoint=True` resumes the newest, with the same
      settings, data and model (or `resume_with_changes=True`). A finished run that is resumed trains nothing.
    """

    model: Model
    model_init: Any  # Trainer declares these too narrowly
    data_collator: Any
    config: Config
    loss_is_scaled_for_ga = True  # batch_loss divides by the items of the whole optimizer step
    search_objective = "eval_loss"
    """The metric that a hyperparameter search goes by, unless the caller names another."""
    trains_without_dropout = False

    def __init__(
        self,
        model: Model | None,
        config: Config,
        processing_class: Processor | None = None,
        model_init: Callable[..., Model] | None = None,
        peft_config: PeftConfig | None = None,
        *,
        data: DataOptions,
        **options: Unpack[TrainerOptions],
    ):
        """Prepare model and tokenizer, then construct the Trainer; the subclass calls `prepare_datasets` at its end.

        Args:
            model: a loaded model; None with model_init.
            config: stays as it is; the trainer works on a copy.
            processing_class: a tokenizer or processor; None loads the one beside the model.
            model_init: makes the model, now and at each start of training.
            peft_config: adapters that `prepare_model` adds.
            data: see `DataOptions`.
            options: see `TrainerOptions`.
        """
        if (model is None) == (model_init is None):
            raise ValueError(f"{type(self).__name__} needs either a model or model_init, and not both.")
        eval_dataset = data["eval_dataset"]
        sets = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
        self.keeps_columns = not config.remove_unused_columns
        self.args = self.config = for_own_collators(config, [data["train_dataset"], *sets])
        self.peft_config = peft_config
        self.recorder, self.tables = Recorder(), Tables()
        if model_init is not None:
            set_seed(config.seed)  # as Trainer does before it calls model_init
            self.model_init = model_init
            model = cast(Model, super().call_model_init())
        loaded = cast(Model, model)
        processing_class = self.load_processing_class(processing_class, loaded)
        self.tokenizer = tokenizer_of(processing_class)
        model = self.prepare_model(loaded)
        check_generation_config(model, self.tokenizer)
        if config.should_save:  # Trainer makes no folder where a link waits for its target
            Path(str(config.output_dir)).resolve().mkdir(parents=True, exist_ok=True)
        super().__init__(model=model, args=self.config, processing_class=processing_class, **data, **options)
        prepare_sharding(self.model, self.accelerator)
        self.model_init = model_init
        self.checkpoints, self.passes = Checkpoints(self), Passes(self)
        self.ending = EndsBySignal(self, saves=config.save_strategy != "no" or config.enable_jit_checkpoint)
        for callback in (self.checkpoints, self.passes, self.ending, MetricsFile()):
            self.add_callback(callback)
        prepare_trackers(self.config)

    # What a trainer supplies ------------------------------------------------------------------------------------------

    def prepare_model(self, model: Model) -> Model:
        """The model as it is trained, with its adapters; called for each model, before it reaches its device."""
        raise NotImplementedError

    def tokenize_dataset(self, dataset: DataSource, use: Use) -> DataSource:
        """A dataset as rows that the data collator reads. Each process calls it, the main one first."""
        raise NotImplementedError

    def count_items(self, batch: Batch) -> Tensor | int:
        """How many items of a micro-batch count, such as tokens or pairs."""
        raise NotImplementedError

    def batch_loss(self, model: nn.Module, batch: Batch, items: Items) -> BatchLoss:
        """The loss of a micro-batch and its statistics.

        Args:
            model: the model, as it is wrapped.
            batch: on the device; in an evaluation it may have the entry `REAL_ROWS`.
            items: what the sum of losses is divided by, from `items_of`.
        """
        raise NotImplementedError

    def micro_batches(self, batches: list[Any]) -> list[Batch]:
        """What to train on for the batches of the data loader that belong to one optimizer step."""
        return batches

    def without_repetitions(self, batch: Batch, real_rows: int | None) -> Batch:
        """A batch of an evaluation, of which only the first `real_rows` rows count; None: all of them."""
        return {**batch, REAL_ROWS: real_rows}

    def log_samples(self, dataloader: DataLoader[Batch], prefix: str) -> None:
        """Put samples into tables at the end of an evaluation, under names that begin with the prefix."""

    # Models and data --------------------------------------------------------------------------------------------------

    def load_processing_class(self, processing_class: Processor | None, model: Model) -> Processor:
        """The processing class, or the one that is saved beside the model."""
        return load_processing_class(processing_class, model)

    def call_model_init(self, trial: Trial = None) -> Model:
        """A new model from `model_init`, prepared as the first one was."""
        return self.prepare_model(cast(Model, super().call_model_init(trial)))

    def shard_model(self) -> None:
        """Shard the model before it is trained, if FSDP shards it at all: Trainer cannot evaluate it until then."""
        if self.accelerator.is_fsdp2 and self.optimizer is None:
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.create_optimizer())
            self.model_wrapped = self.model

    def prepare_datasets(self) -> None:
        """Prepare the training set and all evaluation sets, once everything that they need is set up."""
        self.train_dataset = self.prepare_dataset(self.train_dataset)
        if isinstance(self.eval_dataset, dict):
            self.eval_dataset = {name: self.prepare_dataset(one, "eval") for name, one in self.eval_dataset.items()}
        else:
            self.eval_dataset = self.prepare_dataset(self.eval_dataset, "eval")

    def prepare_dataset(self, dataset: DataSource | None, use: Use = "train") -> Any:
        """A dataset as the data collator reads it; None stays None. Collective."""
        if dataset is None:
            return None
        check_features(dataset)
        with self.args.main_process_first(desc="tokenizing"):
            return self.tokenize_dataset(dataset, use)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Batches for training: of one pass over a stream, but inside `train` of all its passes."""
        loader = super().get_train_dataloader()
        return self.passes.over(loader) if self.is_in_train else loader

    def get_eval_dataloader(self, eval_dataset: DataSource | str | None = None) -> DataLoader[Batch]:
        """Batches for evaluation; a dataset that was not given to the constructor is prepared here."""
        known = [*self.eval_dataset.values()] if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        is_known = isinstance(eval_dataset, str) or any(eval_dataset is one for one in [*known, None])
        return super().get_eval_dataloader(eval_dataset if is_known else self.prepare_dataset(eval_dataset, "eval"))

    def get_test_dataloader(self, test_dataset: DataSource) -> DataLoader[Batch]:
        """Batches for `predict`; the dataset is prepared here."""
        return super().get_test_dataloader(self.prepare_dataset(test_dataset, "test"))

    # The loss ---------------------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Any]:
        """The micro-batches of an optimizer step, and what their loss divides by; none once all steps are done."""
        if 0 < self.state.max_steps <= self.state.global_step:
            return [], None
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        check_batches(batches, is_first=not self.state.global_step)
        batches = self.micro_batches(batches)
        return batches, self.items_of(batches)

    def items_of(self, batches: Sequence[Batch], *, of_all_processes: bool = True) -> Any:
        """What the loss of these micro-batches divides by: their items, at least 1, so that no items give loss 0.

        Args:
            batches: of an optimizer step, on this process.
            of_all_processes: add those of the other processes, as Trainer does. Collective.
        """
        return self.total(map(self.count_items, batches), of_all_processes=of_all_processes).clamp(min=1)

    def total(self, counts: Iterable[Tensor | int], *, of_all_processes: bool = True) -> Tensor:
        """The sum of counts, a float32 scalar; over all processes if the arguments do not keep them apart."""
        device = self.args.device
        total = sum((torch.as_tensor(count, device=device) for count in counts), start=torch.zeros((), device=device))
        if of_all_processes and self.args.average_tokens_across_devices:
            total = self.accelerator.reduce(total, reduction="sum")
        return total

    @property
    def num_averaged(self) -> int:
        """How many processes' gradients are averaged although the loss was divided by the items of all of them."""
        return self.accelerator.num_processes if self.args.average_tokens_across_devices else 1

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a micro-batch, as its part of the loss of the optimizer step; its statistics are recorded.

        Args:
            model: the model, as it is wrapped.
            inputs: a batch.
            return_outputs: return the outputs that `batch_loss` names, too.
            num_items_in_batch: what the loss of the step divides by; None, the micro-batch alone.
        """
        is_alone = num_items_in_batch is None
        items = self.items_of([inputs], of_all_processes=False) if is_alone else num_items_in_batch
        with self.dropout_off(model) if is_alone else nullcontext():  # else training_step keeps it off, in backward too
            loss, stats, outputs = self.batch_loss(model, inputs, items)
        self.recorder.add(stats, training=model.training)
        loss = loss if is_alone else loss * self.num_averaged
        return (loss, outputs) if return_outputs else loss

    @property
    def is_noisy(self) -> bool:
        """Whether training adds noise to the model's layers: dropout, or NEFTune."""
        has_neftune = self.config.neftune_noise_alpha is not None
        return has_neftune or (has_dropout(self.model) and not self.trains_without_dropout)

    def dropout_off(self, model: nn.Module) -> AbstractContextManager[None]:
        """Without dropout inside the block, if the trainer asks for it."""
        return dropout_rates_at_zero(model) if self.trains_without_dropout else nullcontext()

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of a micro-batch, which computes checkpointed layers again: dropout is off in both.

        Raises:
            TrainingDivergedError: the loss is not finite; the optimizer has not seen its gradient.
        """
        items = self.items_of_step if num_items_in_batch is None else num_items_in_batch
        with self.dropout_off(model):
            loss = super().training_step(model, inputs, items)
        if not bool(torch.isfinite(loss)):
            raise TrainingDivergedError(
                f"The loss is {float(loss)} in step {self.state.global_step + 1}; no weight has moved since the step "
                "before. Resume from the last checkpoint with a lower learning rate, clip gradients (max_grad_norm), "
                "use bf16 instead of fp16, and look for rows of the data that are all padding or truncated."
            )
        return loss

    # Evaluation and logs ----------------------------------------------------------------------------------------------

    def real_rows(self) -> int | None:
        """How many rows of this process's evaluation batch do not repeat others; None, if all are real.

        Processes repeat rows to fill their last batches. The length of a stream is not known: all its rows are real.
        """
        state, accelerator = self.accelerator.gradient_state, self.accelerator
        if accelerator.num_processes == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return None
        rows = self.args.eval_batch_size // (accelerator.num_processes if accelerator.split_batches else 1)
        return min(max(state.remainder - accelerator.process_index * rows, 0), rows)

    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Prediction:
        """The loss, and the `predictions` and `labels` of `batch_loss`."""
        batch = self.without_repetitions(send_to_device(inputs, self.args.device), self.real_rows())
        with torch.no_grad(), self.compute_loss_context_manager():
            if prediction_loss_only:
                return self.compute_loss(model, batch).detach(), None, None
            loss, outputs = self.compute_loss(model, batch, return_outputs=True)
        return loss.detach(), *self.predictions_of(outputs)

    def evaluation_loop(
        self,
        dataloader: DataLoader[Batch],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """As in transformers, with statistics over all rows instead of means over batches, and tables of samples."""
        self.shard_model()
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        check_evaluated(output.num_samples)
        recorded = {f"{metric_key_prefix}_{name}": value for name, value in self.statistics(training=False).items()}
        mean_loss = {name: value for name, value in recorded.items() if name == f"{metric_key_prefix}_loss"}
        self.log_samples(dataloader, metric_key_prefix)
        reshard(self.model)
        metrics = recorded | (output.metrics or {}) | mean_loss  # compute_metrics may have names of its own
        return output._replace(metrics=metrics)

    def statistics(self, *, training: bool) -> dict[str, float]:
        """The statistics since the last call, over all processes. Collective."""
        return self.recorder.flush(training=training)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with what was recorded since the last log of training."""
        super().log((self.statistics(training=True) if "loss" in logs else {}) | logs, start_time)

    def hyperparameter_search(
        self,
        hp_space: Callable[..., dict[str, float]] | None = None,
        compute_objective: Callable[[dict[str, float]], float] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> BestRun | list[BestRun]:
        """As in transformers, whose objective would sum all statistics; here it is `search_objective`."""
        objective = compute_objective or itemgetter(self.search_objective)
        return super().hyperparameter_search(hp_space, objective, *args, **kwargs)

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Trial = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train as `Trainer.train` does; the class says what is asked of a checkpoint.

        Args:
            resume_from_checkpoint: a checkpoint's folder, or True for the last complete one in output_dir.
            trial: of a hyperparameter search.
            ignore_keys_for_eval: as in transformers.

        Raises:
            CheckpointError: the checkpoint is damaged or of another run; or a new run would save beside the
                checkpoints of another; or the file system refuses a checkpoint.
        """
        self.recorder = Recorder()
        checkpoint = self.open_run(resume_from_checkpoint, trial)
        with self.ending.during_train():
            return super().train(checkpoint, trial, ignore_keys_for_eval)

    def open_run(self, resume_from_checkpoint: str | Path | bool | None, trial: Trial = None) -> str | None:
        """Begin a run, or take one up: the folder of its verified checkpoint. Collective; raises as `train` does."""
        data, model = self.data_of_run(), self.model  # a trial makes its model later
        record = RunRecord.of(
            self.config,
            without=WITHOUT_EFFECT,
            data=rows_fingerprint(data) if isinstance(data, Dataset) else None,
            model=layout_fingerprint(model) if isinstance(model, nn.Module) else None,
            processes=self.config.world_size,
        )
        if resume_from_checkpoint:
            return self.checkpoints.resume(self.config, record, resume_from_checkpoint)
        self.checkpoints.begin_run(self.config, record, is_trial=trial is not None)
        return None

    def data_of_run(self) -> DataSource | None:
        """The dataset by which a run is told from another."""
        return self.train_dataset

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self.checkpoints.saving():
            super()._save_checkpoint(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        super()._push_from_checkpoint(str(self.checkpoints.publish() or checkpoint_folder))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model so that `from_pretrained` loads it; for a checkpoint, open its folder first."""
        is_checkpoint = _internal_call and self.checkpoints.begin_save(output_dir)
        with nullcontext() if is_checkpoint else full_state_dicts(self.accelerator):
            super().save_model(output_dir, _internal_call)
