"""The one class between `transformers.Trainer` and our trainers: it knows no algorithm, and uses documented hooks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Generic, TypeVar, Unpack, cast

import torch
from accelerate.utils import send_to_device
from peft import PeftConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, set_seed
from transformers.trainer_utils import EvalLoopOutput, TrainOutput

from trimtab_common.health import TrainingDivergedError
from trimtab_common.sharding import full_state_dicts, reshard
from trimtab_common.stats import Recorder
from trimtab_lm.data.media import check_features, check_row
from trimtab_lm.data.sources import rows_in_words
from trimtab_lm.interface import Model, Processor, check_generation_config, tokenizer_of
from trimtab_lm.models.loading import check_precision
from trimtab_lm.tokens.dropout import dropout_rates_at_zero, has_dropout
from trimtab_lm.tokens.forward import best_layout, masked_size

from .callback import AdapterCallback
from .cards import write_card
from .checkpoints import Checkpoints, make_output_dir
from .config import Config, for_own_collators
from .hooks import HooksOf2024, predictions_of
from .lines import show_lines
from .models import load_processing_class, prepare_sharding
from .streams import NO_BATCH, Passes
from .tracking import Tables, prepare_trackers
from .types import Batch, BatchLoss, DataOptions, DataSource, Prediction, TrainerOptions, Trial, Use

Items = TypeVar("Items")
"""What the loss of a step divides by: a number of tokens or pairs."""

REAL_ROWS = "real_rows"
"""In a batch of an evaluation: how many of its rows are real, see the function `real_rows`."""


class TrainerAdapter(HooksOf2024, Generic[Config, Items]):
    """`transformers.Trainer` for losses averaged over the items of an optimizer step, such as tokens or pairs.

    A subclass supplies `prepare_model`, `tokenize_dataset`, `count_items` and `batch_loss`. The adapter divides the
    loss by the items of all micro-batches and processes, counts each row of an evaluation once, logs statistics as
    means over all that was recorded, raises an error before a loss that is not finite moves a weight, and seals the
    checkpoints of one run in a folder: `resume_from_checkpoint=True` resumes the newest, with the same settings, data
    and model (or `resume_with_changes=True`). A finished run that is resumed trains nothing.
    """

    model: Model
    model_init: Any  # Trainer declares these too narrowly
    data_collator: Any
    config: Config
    loss_is_scaled_for_ga = True  # batch_loss divides by the items of the whole optimizer step
    search_objective = "eval_loss"  # the metric of a hyperparameter search, unless the caller names another
    trains_without_dropout = False  # True: dropout is off until the end of backward
    watched: tuple[str, ...] = ("loss", "grad_norm", "learning_rate")  # the statistics that a printed line shows
    method: str  # the algorithm and its paper, for the model card
    paper: str
    about: Mapping[str, object] = MappingProxyType({})  # settings of the program: dataset, split, reward

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

        The model is loaded already, or made by model_init, now and at each start of training. The trainer works on a
        copy of the config.

        Raises:
            ValueError: the process sees several GPUs, and the model is on one of them.
        """
        self.keeps_columns, self.peft_config = not config.remove_unused_columns, peft_config
        self.args = self.config = for_own_collators(config, data["train_dataset"], data["eval_dataset"])
        self.recorder, self.tables = Recorder(), Tables()
        self.rows = rows_in_words(data["train_dataset"])
        self.has_own_collator = data["data_collator"] is not None
        self.model_init = model_init
        model = first_model(self, model)
        processing_class = self.load_processing_class(processing_class, model)
        self.tokenizer = tokenizer_of(processing_class)
        model = self.prepare_model(model)
        check_generation_config(model, self.tokenizer)
        make_output_dir(config)
        super().__init__(model=model, args=self.config, processing_class=processing_class, **data, **options)
        if self.args.n_gpu > 1:  # Trainer has set it to 1 for a model whose layers are divided among the GPUs
            raise ValueError(
                f"This one process sees {self.args.n_gpu} GPUs, among which {type(self).__name__} does not divide "
                "batches. Start a process for each (accelerate launch), or show it one (CUDA_VISIBLE_DEVICES=0)."
            )
        show_lines(self, self.watched)
        check_precision(self.model, self.accelerator)
        prepare_sharding(self.model, self.accelerator)
        self.model_init = model_init
        self.checkpoints, self.passes = Checkpoints(self), Passes(self)
        saves = config.save_strategy != "no" or config.enable_jit_checkpoint
        self.ending = AdapterCallback(self, self.checkpoints, self.passes, saves=saves)
        self.add_callback(self.ending)
        prepare_trackers(self)

    # What a trainer supplies ------------------------------------------------------------------------------------------

    def prepare_model(self, model: Model) -> Model:
        """Prepares a model for training, adapters included; called for each model, before it reaches its device."""
        raise NotImplementedError

    def tokenize_dataset(self, dataset: DataSource, use: Use) -> DataSource:
        """A dataset as rows that the data collator reads. Each process calls it, the main one first."""
        raise NotImplementedError

    def count_items(self, batch: Batch) -> Tensor | int:
        """How many items of a micro-batch count, such as tokens or pairs."""
        raise NotImplementedError

    def batch_loss(self, model: nn.Module, batch: Batch, items: Items) -> BatchLoss:
        """The loss of a micro-batch, its sum divided by `items` (from `items_of`), and its statistics.

        model: as it is wrapped. batch: on the device; in an evaluation it may have the entry `REAL_ROWS`.
        """
        raise NotImplementedError

    def micro_batches(self, batches: list[Any]) -> list[Batch]:
        """The micro-batches to train on, from the data loader's batches of one optimizer step."""
        return batches

    def without_repetitions(self, batch: Batch, real_rows: int | None) -> Batch:
        """An evaluation batch, of which only the first `real_rows` rows count; None: all rows."""
        return {**batch, REAL_ROWS: real_rows}

    def statistics(self, *, training: bool) -> dict[str, float]:
        """The statistics since the last call, over all processes. Collective."""
        return self.recorder.flush(training=training)

    def begin_evaluation(self) -> None:
        """Forget what an evaluation that failed has recorded."""
        self.recorder.drop(training=False)

    def log_samples(self, dataloader: DataLoader[Batch], prefix: str) -> None:
        """Put samples into tables at the end of an evaluation, under names that begin with the prefix."""

    def load_processing_class(self, processing_class: Processor | None, model: Model) -> Processor:
        """The processing class, or the one saved with the model."""
        return load_processing_class(processing_class, model, self.config.model_init_kwargs)

    # Models and data --------------------------------------------------------------------------------------------------

    def call_model_init(self, trial: Trial = None) -> Model:
        """A new model from `model_init`, prepared as the first one was."""
        return self.prepare_model(cast(Model, super().call_model_init(trial)))

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

    def get_batch_samples(self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device) -> Any:
        """The micro-batches of an optimizer step, and what their loss divides by; none once all steps are done."""
        if 0 < self.state.max_steps <= self.state.global_step:
            return [], None
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches and not self.state.global_step:
            raise ValueError(f"The training data {NO_BATCH}")
        for batch in batches if self.has_own_collator else []:
            if isinstance(batch, Mapping):  # GRPO's are lists of rows
                check_row(batch)
        batches = self.micro_batches(batches)
        return batches, self.items_of(batches)

    def items_of(self, batches: Sequence[Batch], *, of_all_processes: bool = True) -> Any:
        """The divisor of the loss of these micro-batches: their items, at least 1, so that no items give loss 0.

        of_all_processes: add the other processes' items, as Trainer does. Collective then.
        """
        return total(self, map(self.count_items, batches), of_all_processes=of_all_processes).clamp(min=1)

    def part_of_step(self, batch: Batch, items: Any) -> tuple[Any, Any]:
        """How many items a micro-batch has, and how many its optimizer step has; hooks of 2024 return means."""
        return self.count_items(batch) * num_averaged(self), items

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a micro-batch, as its part of the loss of the optimizer step; its statistics are recorded.

        num_items_in_batch: what the loss of the step divides by; None, the micro-batch alone.
        """
        is_alone = num_items_in_batch is None
        items = self.items_of([inputs], of_all_processes=False) if is_alone else num_items_in_batch
        # In a step training_step keeps dropout off, in the backward pass too.
        with dropout_off(self, model) if is_alone else nullcontext():
            loss, stats, outputs = self.batch_loss(model, inputs, items)
        self.recorder.add(stats, training=model.training)
        loss = loss if is_alone else loss * num_averaged(self)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of a micro-batch; TrainingDivergedError if the loss is not finite."""
        items = self.items_of_step if num_items_in_batch is None else num_items_in_batch
        with dropout_off(self, model):  # checkpointed layers are computed again in backward
            loss = super().training_step(model, inputs, items)
        if not bool(torch.isfinite(loss)):
            raise TrainingDivergedError(
                f"The loss is {float(loss)} in step {self.state.global_step + 1}; no weight has moved since the step "
                "before. Resume from the last checkpoint with a lower learning rate, clip gradients (max_grad_norm), "
                "use bf16 instead of fp16, and look for rows of the data that are all padding or truncated."
            )
        return loss

    # Evaluation and logs ----------------------------------------------------------------------------------------------

    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Prediction:
        """The loss, and the `predictions` and `labels` of `batch_loss`."""
        batch = self.without_repetitions(send_to_device(inputs, self.args.device), real_rows(self))
        with torch.no_grad(), self.compute_loss_context_manager():
            if prediction_loss_only:
                return self.compute_loss(model, batch).detach(), None, None
            loss, outputs = self.compute_loss(model, batch, return_outputs=True)
        return loss.detach(), *predictions_of(outputs, are_needed=self.compute_metrics is not None)

    def evaluation_loop(self, dataloader: DataLoader[Batch], *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As in transformers, with statistics over all rows instead of means over batches, and tables of samples."""
        prefix = args[3] if len(args) > 3 else kwargs.get("metric_key_prefix", "eval")
        self.begin_evaluation()
        shard_model(self)
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        if not output.num_samples:
            raise ValueError("There is no row to evaluate: a filter, or a limit such as max_length, leaves none.")
        recorded = {f"{prefix}_{name}": value for name, value in self.statistics(training=False).items()}
        metrics = recorded | (output.metrics or {})
        if (loss := f"{prefix}_loss") in recorded:  # compute_metrics may replace a statistic, but not the loss
            metrics[loss] = recorded[loss]
        self.log_samples(dataloader, prefix)
        reshard(self.model)
        return output._replace(metrics=metrics)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with what was recorded since the last log of training."""
        super().log((self.statistics(training=True) if "loss" in logs else {}) | logs, start_time)

    def hyperparameter_search(self, hp_space: Any = None, compute_objective: Any = None, *args: Any, **kw: Any) -> Any:
        """As in transformers, whose objective would sum all statistics; here it is `search_objective`."""
        objective = compute_objective or itemgetter(self.search_objective)
        return super().hyperparameter_search(hp_space, objective, *args, **kw)

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Trial = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train as `Trainer.train` does.

        resume_from_checkpoint is a checkpoint's folder, a folder of checkpoints for the newest whole one in it, or True
        for the newest whole one in output_dir.

        Raises:
            CheckpointError: the checkpoint is damaged or of another run; or a new run would save beside the
                checkpoints of another; or the file system refuses a checkpoint.
        """
        self.recorder = Recorder()
        checkpoint = self.open_run(resume_from_checkpoint, trial)
        with self.ending.during_train():
            return super().train(checkpoint, trial, ignore_keys_for_eval)

    def open_run(self, resume_from_checkpoint: Any, trial: Trial = None) -> str | None:
        """Begin a run, or resume one and return its verified checkpoint. Collective; raises as `train` does."""
        data = self.rows_of_run()
        return self.checkpoints.open_run(self.config, data, resume_from_checkpoint, is_trial=trial is not None)

    def rows_of_run(self) -> DataSource | None:
        """The training rows that a resumed run must have again."""
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
        if self.args.should_save:
            write_card(self, output_dir or str(self.args.output_dir))

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Writes the model card, README.md, into `output_dir`; arguments as of transformers.

        `tasks`, `dataset_tags`, `dataset` and `dataset_args` become rows of its table on training.
        """
        if not self.is_world_process_zero():
            return
        given = {"tasks": tasks, "dataset tags": dataset_tags, "dataset": dataset, "dataset arguments": dataset_args}
        about = {name: value for name, value in given.items() if value is not None}
        more: dict[str, Any] = {"language": language, "license": license, "name": model_name}
        more["tags"] = [tags] if isinstance(tags, str) else tags or []
        if finetuned_from is not None:
            more["base_model"] = finetuned_from
        write_card(self, str(self.args.output_dir), repo_id=self.hub_model_id, about=about, **more)


AnyTrainer = TrainerAdapter[Any, Any]


def first_model(trainer: AnyTrainer, model: Model | None) -> Model:
    """The model that the trainer was given, or the one that its model_init makes."""
    if (model is None) == (trainer.model_init is None):
        raise ValueError(f"{type(trainer).__name__} needs either a model or model_init, and not both.")
    if model is not None:
        return model
    set_seed(trainer.args.seed)  # as Trainer does before it calls model_init
    return cast(Model, Trainer.call_model_init(trainer))


def prepare_datasets(trainer: AnyTrainer) -> None:
    """Prepare the training set and all evaluation sets, once everything that they need is set up."""
    trainer.train_dataset = trainer.prepare_dataset(trainer.train_dataset)
    given = trainer.eval_dataset
    if isinstance(given, dict):
        trainer.eval_dataset = {name: trainer.prepare_dataset(one, "eval") for name, one in given.items()}
    else:
        trainer.eval_dataset = trainer.prepare_dataset(given, "eval")


def is_noisy(trainer: AnyTrainer) -> bool:
    """Whether training adds noise to the model's layers: dropout, or NEFTune."""
    has_neftune = trainer.config.neftune_noise_alpha is not None
    return has_neftune or (has_dropout(trainer.model) and not trainer.trains_without_dropout)


def layout_of(trainer: AnyTrainer) -> dict[str, Any]:
    """The `layout` and `hidden_size` of `lay_out` for a prompt's answers, which may share it: `share_prompts`."""
    shares, noisy = trainer.config.share_prompts, is_noisy(trainer)
    # A single row shares prompts in any case.
    layout = best_layout(trainer.model, share_prefix=shares is not False, is_noisy=noisy or shares is False)
    return {"layout": layout, "hidden_size": masked_size(trainer.model) if shares is None else None}


def total(trainer: AnyTrainer, counts: Iterable[Tensor | int], *, of_all_processes: bool = True) -> Tensor:
    """The sum of counts, a float32 scalar; over all processes if the arguments do not keep them apart."""
    own = torch.zeros((), device=trainer.args.device)
    for count in counts:
        own = own + torch.as_tensor(count, device=own.device)
    if of_all_processes and trainer.args.average_tokens_across_devices:
        own = trainer.accelerator.reduce(own, reduction="sum")
    return own


def num_averaged(trainer: AnyTrainer) -> int:
    """The number of processes whose gradients are averaged after the loss was divided by all their items."""
    return trainer.accelerator.num_processes if trainer.args.average_tokens_across_devices else 1


def dropout_off(trainer: AnyTrainer, model: nn.Module) -> AbstractContextManager[None]:
    """Switches dropout off inside the block, if the trainer asks for it."""
    return dropout_rates_at_zero(model) if trainer.trains_without_dropout else nullcontext()


def real_rows(trainer: AnyTrainer) -> int | None:
    """How many rows of this process's evaluation batch do not repeat others; None, if all are real.

    Processes repeat rows to fill their last batches. The length of a stream is not known: all its rows are real.
    """
    state, accelerator = trainer.accelerator.gradient_state, trainer.accelerator
    if accelerator.num_processes == 1 or not state.end_of_dataloader or state.remainder <= 0:
        return None
    rows = trainer.args.eval_batch_size // (accelerator.num_processes if accelerator.split_batches else 1)
    return min(max(state.remainder - accelerator.process_index * rows, 0), rows)


def shard_model(trainer: AnyTrainer) -> None:
    """Shard the model before it is trained, if FSDP shards it at all: Trainer cannot evaluate it until then."""
    if trainer.accelerator.is_fsdp2 and trainer.optimizer is None:
        trainer.model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.create_optimizer())
        trainer.model_wrapped = trainer.model
