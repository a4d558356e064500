"""The run of IterativeSFTTrainer, as of `Trainer.train`: updates, schedule, logs, evaluation, checkpoints."""

import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.checkpointing import load_accelerator_state
from accelerate.utils import DistributedType
from accelerate.utils.memory import clear_device_cache
from peft import PeftModel
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import TrainerState
from transformers.integrations.deepspeed import deepspeed_init
from transformers.integrations.liger import apply_liger_kernel
from transformers.integrations.neftune import activate_neftune
from transformers.trainer_utils import HubStrategy, SaveStrategy, SchedulerType

from trimtab_common.seeding import private_rngs, sampling_seed
from trimtab_common.sharding import whole_tensor
from trimtab_common.stats import Mean, Recorder, gather_over_ranks
from trimtab_lm.compat.arguments import count_tokens
from trimtab_lm.hf.checkpoints import STATE
from trimtab_lm.hf.config import CHECKPOINTING, checkpointed_layers, checkpointing_of
from trimtab_lm.hf.labels import LabelTrainer
from trimtab_lm.hf.types import Batch
from trimtab_lm.interface import Model, base_of

from .algorithm import batches_of_updates
from .config import IterativeSFTConfig
from .data import Rows

PROGRESS, SCHEDULE, ROWS = "iterative_sft.json", "scheduler.pt", "rows_{rank}.json"
PARTS_OF_ALL_STEPS = ("warmup_steps", "logging_steps", "eval_steps", "save_steps")
STRATEGIES = ("logging_strategy", "eval_strategy", "save_strategy")
ENDLESS_SCHEDULES = (SchedulerType.CONSTANT, SchedulerType.CONSTANT_WITH_WARMUP, SchedulerType.REDUCE_ON_PLATEAU)


@dataclass
class Progress:
    """The caller's progress: finished calls of `step`, and finished updates of the unfinished call."""

    calls: int = 0
    updates: int = 0


class StepRun:
    """The services of a caller's loop over `step`.

    Args:
        trainer: an IterativeSFTTrainer.

    Attributes:
        progress: how far the caller has come.
        unfinished: the rows of the call in whose middle the resumed checkpoint was saved; None after a whole call.
        stats: statistics of the present call; the trainer's `recorder` holds those since the last log.
        unlogged_loss: the sum of the updates' losses since the last log.
    """

    def __init__(self, trainer: LabelTrainer[IterativeSFTConfig]) -> None:
        self.trainer: Any = trainer  # Trainer declares its optimizer, schedule, state and engine too narrowly
        if not (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled):  # which make it over the sharded parameters
            trainer.create_optimizer()
        self.progress, self.stats = Progress(), Recorder()
        self.unfinished: Rows | None = None
        self.unlogged_loss = torch.zeros((), device=trainer.args.device)
        self._rows: Rows = []  # of the present call
        self._last_log = 0
        self._is_started = False

    def notify(self, event: str) -> None:
        """Call the callbacks, which answer in the trainer's `control`."""
        trainer = self.trainer
        trainer.control = getattr(trainer.callback_handler, event)(trainer.args, trainer.state, trainer.control)

    # A call of step ---------------------------------------------------------------------------------------------------

    def begin_call(self, rows: Rows) -> list[list[Batch]]:
        """Start the run at the first call, and check the rows' number. Collective.

        Returns:
            The batches of each update, in an order that depends on the seed and the number of the call alone.
        """
        trainer, args = self.trainer, self.trainer.args
        trainer.ending.interruption.begin_step()
        if not self._is_started:
            self._start(trainer.open_run(None))
        counts = gather_over_ranks(len(rows))
        if len(set(counts)) > 1:
            raise ValueError(
                f"The processes gave {counts} rows to step, and would wait for one another. Give each the same number."
            )
        if self.is_finished:
            raise ValueError(
                f"max_steps={args.max_steps} optimizer steps are done, and the learning rate's schedule has "
                "ended. Raise max_steps, or leave it out for a constant learning rate."
            )
        self._rows = rows
        seed = sampling_seed(args.seed, rank=args.process_index, draw=self.progress.calls)
        sizes = {"batch_size": args.train_batch_size, "accumulation": args.gradient_accumulation_steps}
        windows = batches_of_updates(rows, trainer.data_collator, **sizes, seed=seed)
        if self.progress.updates >= len(windows):  # a resumed call with larger batches than before: nothing is left
            self.progress.calls, self.progress.updates = self.progress.calls + 1, 0
            return []
        return windows

    def updates_left(self, windows: list[list[Batch]]) -> list[list[Batch]]:
        """The batches of each update that the call has left; those beyond max_steps are left out, with a warning."""
        args, rest = self.trainer.args, windows[self.progress.updates :]  # those before were done before the checkpoint
        most = args.max_steps - self.trainer.state.global_step if args.max_steps > 0 else len(rest)
        if len(rest) > most:
            warnings.warn(
                f"max_steps={args.max_steps} ends this call of step: {most} of its {len(rest)} optimizer steps are "
                "taken, and the other rows are not learnt. Raise max_steps, or leave it out for a constant learning "
                "rate.",
                stacklevel=4,
            )
        return rest[:most]

    @contextmanager
    def updates_of_call(self) -> Iterator[None]:
        """Around the updates of a call: one that fails leaves no count, gradient or statistic to the next call."""
        try:
            yield
        except BaseException:
            self.progress.updates, self._last_log = 0, self.trainer.state.global_step
            self.trainer.model_wrapped.zero_grad()
            self.unlogged_loss.zero_()
            self.stats, self.trainer.recorder = Recorder(), Recorder()
            raise

    # An optimizer step: see `algorithm.Optimizer` ---------------------------------------------------------------------

    def parts(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        """Yields the batches of an optimizer step; gradients are exchanged with the last."""
        accelerator, model = self.trainer.accelerator, self.trainer.model_wrapped
        self.notify("on_step_begin")
        for i, batch in enumerate(batches):
            accelerator.sync_gradients = is_last = i == len(batches) - 1
            exchanges = is_last or accelerator.distributed_type == DistributedType.DEEPSPEED
            with nullcontext() if exchanges else accelerator.no_sync(model):
                yield batch
            if not is_last:
                self.notify("on_substep_end")

    def backward(self, batch: Batch, count: Tensor) -> None:
        """Forward and backward of a batch, as in `Trainer.train`."""
        trainer = self.trainer
        count_tokens(trainer, batch)
        self.unlogged_loss += trainer.training_step(trainer.model_wrapped, batch, count)
        trainer.current_flos += int(trainer.floating_point_ops(batch))

    def step(self) -> dict[str, Any]:
        """Clips the gradient, changes the weights and moves the schedule; calls the callbacks of `Trainer.train`."""
        trainer, accelerator, model = self.trainer, self.trainer.accelerator, self.trainer.model_wrapped
        norm = accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm or float("inf"))
        self.notify("on_pre_optimizer_step")
        trainer.optimizer.step()
        self.notify("on_optimizer_step")
        learning_rate = trainer.optimizer.param_groups[0]["lr"]
        if not (accelerator.optimizer_step_was_skipped or isinstance(trainer.lr_scheduler, ReduceLROnPlateau)):
            trainer.lr_scheduler.step()
        model.zero_grad()
        trainer.state.global_step += 1
        self.notify("on_step_end")
        return {
            "grad_norm": None if norm is None else whole_tensor(torch.as_tensor(norm)),
            "learning_rate": learning_rate,
        }

    def after_update(self, update: dict[str, Any], updates_of_call: int) -> None:
        """Count an update; log, evaluate and save where the callbacks ask for it; end the process at a signal."""
        trainer, progress = self.trainer, self.progress
        progress.updates += 1
        if progress.updates == updates_of_call:
            progress.calls, progress.updates = progress.calls + 1, 0
        trainer.state.epoch = progress.calls + progress.updates / updates_of_call
        if trainer.control.should_log:
            updates, self._last_log = trainer.state.global_step - self._last_log, trainer.state.global_step
            loss = trainer.accelerator.reduce(self.unlogged_loss, reduction="mean").item() / updates
            self.unlogged_loss.zero_()
            norm = {} if update["grad_norm"] is None else {"grad_norm": float(update["grad_norm"])}
            trainer.store_flos()
            trainer.log({"loss": loss, **norm, "learning_rate": update["learning_rate"]})
        if trainer.control.should_evaluate:
            is_best = self._note_best(trainer.evaluate())
            if trainer.args.save_strategy == SaveStrategy.BEST:
                trainer.control.should_save = is_best
        if trainer.control.should_save:
            self.save()
        if trainer.ending.stops and progress.updates:
            trainer.ending.interruption.end()

    def end_call(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Stop handling signals after the last call; free unused memory if the config asks for it. Collective.

        Args:
            summary: the call's results so far; its tensors are equal on all processes.

        Returns:
            The summary and the call's statistics as numbers, `epoch` (calls so far) and `global_step`.
        """
        trainer = self.trainer
        if trainer.ending.stops or self.is_finished:
            trainer.ending.interruption.release()
        if trainer.config.optimize_device_cache:
            clear_device_cache(garbage_collection=True)
        where = {"epoch": self.progress.calls, "global_step": trainer.state.global_step}
        unread = {name: Mean(value, 1) for name, value in summary.items() if isinstance(value, Tensor)}
        self.stats.add(unread, training=True)  # the host waits for all of them at once
        return summary | self.stats.flush(training=True) | where

    @property
    def is_finished(self) -> bool:
        """Whether max_steps updates are done."""
        return bool(0 < self.trainer.args.max_steps <= self.trainer.state.global_step)

    def _note_best(self, metrics: dict[str, float]) -> bool:
        """Whether an evaluation is the best so far; a schedule that waits for a plateau reads its metric, too."""
        args, state = self.trainer.args, self.trainer.state
        if args.metric_for_best_model is None:
            return False
        name = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
        if name not in metrics:
            raise ValueError(f"metric_for_best_model={name!r} is none of the evaluation's {sorted(metrics)}.")
        value, best = metrics[name], state.best_metric
        if isinstance(self.trainer.lr_scheduler, ReduceLROnPlateau):
            self.trainer.lr_scheduler.step(value)
        is_best = best is None or (value > best if args.greater_is_better else value < best)
        if is_best:
            state.best_metric, state.best_global_step = value, state.global_step
        return is_best

    # Start ------------------------------------------------------------------------------------------------------------

    def check_settings(self) -> None:
        """Raises ValueError for settings of `Trainer.train` that have no meaning in a caller's loop."""
        args = self.trainer.args
        parts = {name: value for name in PARTS_OF_ALL_STEPS if 0 < (value := getattr(args, name) or 0) < 1}
        if parts and args.max_steps <= 0:
            named = ", ".join(f"{name}={value}" for name, value in parts.items())
            raise ValueError(
                f"{named} below 1 means a part of max_steps, and max_steps is not set. Set max_steps, or give a number "
                "of optimizer steps."
            )
        if args.load_best_model_at_end:
            raise ValueError(
                "load_best_model_at_end=True: training by step(...) has no end at which it could load the best model. "
                "Leave it out, and load the checkpoint of state.best_global_step, or give a train_dataset and call "
                "train()."
            )
        epochs = [f"{name}='epoch'" for name in STRATEGIES if getattr(args, name) == "epoch"]
        if epochs:
            raise ValueError(
                f"{', '.join(epochs)}: training by step(...) has no epochs, at whose ends it could log, evaluate or "
                "save. Set 'steps' with logging_steps, eval_steps or save_steps, or 'no'."
            )

    def _start(self, checkpoint: str | None) -> None:
        """Prepare the model, the optimizer and the learning rate's schedule, and load a checkpoint."""
        trainer, args = self.trainer, self.trainer.args
        self.check_settings()
        trainer.is_in_train = True
        trainer.accelerator.free_memory()
        if args.use_liger_kernel:
            apply_liger_kernel(trainer.model, args.liger_kernel_config)
        is_checkpointing, checkpointing_kwargs = checkpointing_of(args)
        if is_checkpointing:
            enable = getattr(base_of(trainer.model), f"{CHECKPOINTING}_enable")
            enable(checkpointing_kwargs, **checkpointed_layers(args))
        if trainer.neftune_noise_alpha is not None:
            noise = trainer.neftune_noise_alpha
            trainer.neftune_hook_handle = activate_neftune(trainer.model, noise, trainer.accelerator)
        if args.max_steps <= 0 and args.lr_scheduler_type not in ENDLESS_SCHEDULES:
            warnings.warn(
                f"max_steps is not set, so the {SchedulerType(args.lr_scheduler_type).value} schedule of the learning "
                "rate has no end to go to: the learning rate stays constant. Set max_steps, or "
                "lr_scheduler_type='constant'.",
                stacklevel=4,
            )
            args.lr_scheduler_type = SchedulerType.CONSTANT_WITH_WARMUP
        horizon = args.max_steps if args.max_steps > 0 else sys.maxsize
        self._prepare(horizon)
        trainer.state = TrainerState()
        trainer.state.train_batch_size = args.train_batch_size
        trainer.state.compute_steps(args, horizon)
        if checkpoint is not None:
            self._load(Path(checkpoint))
        trainer.state.init_training_references(trainer, horizon, 1, None)
        self._last_log = trainer.state.global_step
        trainer.model_wrapped.zero_grad()
        handler = trainer.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = trainer.model, trainer.optimizer, trainer.lr_scheduler
        trainer.state.max_steps = args.max_steps if args.max_steps > 0 else None  # a progress bar of unknown length
        self.notify("on_train_begin")
        trainer.state.max_steps = horizon
        self._is_started = True
        if args.eval_on_start:
            with private_rngs(args.seed):  # the data loader draws a number, and a checkpoint's state is loaded already
                trainer.evaluate()

    def _prepare(self, horizon: int) -> None:
        """Place and wrap the model and the optimizer, and make the schedule over `horizon` updates."""
        trainer, prepare = self.trainer, self.trainer.accelerator.prepare
        if trainer.is_deepspeed_enabled:
            trainer.optimizer, trainer.lr_scheduler = deepspeed_init(trainer, num_training_steps=horizon)
            schedules = [trainer.lr_scheduler] if trainer.lr_scheduler is not None else []
            trainer.model_wrapped, trainer.optimizer, *schedules = prepare(trainer.model, trainer.optimizer, *schedules)
            trainer.deepspeed = trainer.model_wrapped  # where Trainer looks for the engine in evaluation and saving
            trainer.lr_scheduler = schedules[0] if schedules else None
        elif trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:  # the optimizer takes the sharded parameters
            trainer.model_wrapped = prepare(trainer.model)
            trainer.optimizer = prepare(trainer.create_optimizer(trainer.model_wrapped))
        else:
            trainer.model_wrapped, trainer.optimizer = prepare(trainer.model, trainer.create_optimizer())
        if trainer.is_fsdp_enabled:
            trainer.model = cast(Model, trainer.model_wrapped)
        trainer.create_scheduler(num_training_steps=horizon)

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def resume(self, checkpoint: str | bool | None) -> None:
        """Resume from a checkpoint; arguments and errors as in `IterativeSFTTrainer.train`."""
        if not checkpoint:
            raise ValueError(
                "There is no train_dataset to go through. Call step(...) with rows, or pass resume_from_checkpoint to "
                "go on from a checkpoint."
            )
        if self.trainer.args.restore_callback_states_from_checkpoint:
            raise ValueError(
                "restore_callback_states_from_checkpoint=True: step(...) resumes without the states of "
                "callbacks. Leave it out, and restore what your callbacks need by themselves."
            )
        if self._is_started:
            raise ValueError("Steps were taken already. Resume before the first call of step, in a new trainer.")
        self._start(self.trainer.open_run(checkpoint))

    def save(self) -> None:
        """Save checkpoint-<updates> in output_dir: the model, the progress and all else that the next update needs."""
        trainer, args = self.trainer, self.trainer.args
        with trainer.checkpoints.saving():
            self._write(Path(str(args.output_dir), f"checkpoint-{trainer.state.global_step}"))
        self.notify("on_save")
        if args.push_to_hub and args.hub_strategy != HubStrategy.END:
            trainer.push_to_hub(f"Updates done: {trainer.state.global_step}", blocking=False)

    def _write(self, folder: Path) -> None:
        trainer, args, accelerator = self.trainer, self.trainer.args, self.trainer.accelerator
        trainer.save_model(str(folder), _internal_call=True)
        if not args.save_only_model:
            without_weights = accelerator.register_save_state_pre_hook(lambda models, weights, _: weights.clear())
            accelerator.save_state(str(folder))
            without_weights.remove()
            if self.progress.updates:
                (folder / ROWS.format(rank=args.process_index)).write_text(json.dumps(self._rows))
            if args.should_save:
                torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULE)
        if args.should_save:
            trainer.state.save_to_json(str(folder / STATE))
            (folder / PROGRESS).write_text(json.dumps(asdict(self.progress)))

    def _load(self, folder: Path) -> None:
        trainer, accelerator = self.trainer, self.trainer.accelerator
        if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:  # accelerate holds the shards of the weights
            accelerator.load_state(str(folder))
        else:
            if isinstance(model := trainer.model, PeftModel):
                name = model.active_adapter  # PEFT saves adapters of other names in folders of their own
                saved = folder if name == "default" else folder / name
                model.load_adapter(str(saved), name, is_trainable=True)
            else:
                model.load_state_dict(type(model).from_pretrained(folder, dtype=model.dtype).state_dict())
            index, scaler = trainer.args.process_index, accelerator.scaler
            load_accelerator_state(str(folder), [], [trainer.optimizer], [], [], index, scaler, "cpu")
        # accelerate would unpickle the state of a schedule that it saves, and with it any code that the file holds.
        schedule = folder / SCHEDULE if (folder / SCHEDULE).exists() else folder / "custom_checkpoint_0.pkl"
        trainer.lr_scheduler.load_state_dict(torch.load(schedule, weights_only=True))
        trainer.state = TrainerState.load_from_json(str(folder / STATE))
        vars(self.progress).update(json.loads((folder / PROGRESS).read_text()))
        self._load_rows(folder)

    def _load_rows(self, folder: Path) -> None:
        """Read this process's rows of the call that the checkpoint cut, if as many processes saved it."""
        args = self.trainer.args
        mine, beyond = (folder / ROWS.format(rank=rank) for rank in (args.process_index, args.world_size))
        if all(gather_over_ranks(mine.exists() and not beyond.exists())):
            self.unfinished = json.loads(mine.read_text())
        elif self.progress.updates:
            warnings.warn(
                f"{folder} was saved in the middle of a call of step, by another number of processes or an earlier "
                f"version: its rows are not known. Give call number {self.progress.calls} again, with the same rows; "
                "its updates that were done are left out.",
                stacklevel=6,
            )
