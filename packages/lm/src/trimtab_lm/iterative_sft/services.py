"""What surrounds the updates of IterativeSFTTrainer, as in `Trainer.train`: schedule, logs, evaluation, checkpoints."""

import json
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.checkpointing import load_accelerator_state
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import TrainerState
from transformers.integrations.deepspeed import deepspeed_init
from transformers.integrations.neftune import activate_neftune
from transformers.trainer_utils import HubStrategy, SaveStrategy, SchedulerType

from trimtab_lm.hf.checkpoints import STATE
from trimtab_lm.hf.config import CHECKPOINTING, checkpointing_of
from trimtab_lm.hf.labels import LabelTrainer
from trimtab_lm.hf.models import load_weights
from trimtab_lm.models.interface import Model, base_of

from .config import IterativeSFTConfig

PROGRESS, SCHEDULE = "iterative_sft.json", "scheduler.pt"
ENDLESS_SCHEDULES = (SchedulerType.CONSTANT, SchedulerType.CONSTANT_WITH_WARMUP, SchedulerType.REDUCE_ON_PLATEAU)


@dataclass
class Progress:
    """How far the caller has come: `step` calls that are done, and updates of the call that is not."""

    calls: int = 0
    updates: int = 0

    def count_update(self, updates_of_call: int) -> None:
        """Counts one update of a call that has so many."""
        is_last = self.updates + 1 == updates_of_call
        self.calls, self.updates = (self.calls + 1, 0) if is_last else (self.calls, self.updates + 1)


class StepServices(LabelTrainer[IterativeSFTConfig]):
    """The methods of IterativeSFTTrainer that are no part of the algorithm. Its constructor sets the attributes."""

    optimizer: Any  # Trainer may leave these at None; the constructor and `start` set them
    lr_scheduler: Any
    deepspeed: Any
    state: Any  # its max_steps is None while the progress bar starts without an end
    progress: Progress
    is_started: bool
    unlogged_loss: Tensor
    last_log: int

    def start(self, checkpoint: str | None) -> None:
        """Prepares the model, the optimizer and the learning rate's schedule, and loads a checkpoint."""
        args = self.args
        self.is_in_train = True
        self.accelerator.free_memory()
        is_checkpointing, checkpointing_kwargs = checkpointing_of(args)
        if is_checkpointing:
            getattr(base_of(self.model), f"{CHECKPOINTING}_enable")(checkpointing_kwargs)
        if self.neftune_noise_alpha is not None:
            self.neftune_hook_handle = activate_neftune(self.model, self.neftune_noise_alpha, self.accelerator)
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
        self.state = TrainerState()
        self.state.train_batch_size = args.train_batch_size
        self.state.compute_steps(args, horizon)
        if checkpoint is not None:
            self.load_state(Path(checkpoint))
        self.state.init_training_references(self, horizon, 1, None)
        self.last_log = self.state.global_step
        self.model_wrapped.zero_grad()
        handler = self.callback_handler
        handler.model, handler.optimizer, handler.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        self.state.max_steps = args.max_steps if args.max_steps > 0 else None  # a progress bar of no known length
        self._notify("on_train_begin")
        self.state.max_steps = horizon
        self.is_started = True

    def _prepare(self, horizon: int) -> None:
        """Places and wraps the model and the optimizer, and makes the schedule over `horizon` updates."""
        if self.is_deepspeed_enabled:
            self.optimizer, self.lr_scheduler = deepspeed_init(self, num_training_steps=horizon)
            parts = [self.model, self.optimizer, *([self.lr_scheduler] if self.lr_scheduler is not None else [])]
            self.model_wrapped, self.optimizer, *scheduler = self.accelerator.prepare(*parts)
            self.deepspeed = self.model_wrapped  # where Trainer looks for the engine in evaluation and saving
            self.lr_scheduler = scheduler[0] if scheduler else None
        elif self.is_fsdp_enabled and not self.accelerator.is_fsdp2:  # the optimizer takes the sharded parameters
            self.model_wrapped = self.accelerator.prepare(self.model)
            self.optimizer = self.accelerator.prepare(self.create_optimizer(self.model_wrapped))
        else:
            self.model_wrapped, self.optimizer = self.accelerator.prepare(self.model, self.create_optimizer())
        if self.is_fsdp_enabled:
            self.model = cast(Model, self.model_wrapped)
        self.create_scheduler(num_training_steps=horizon)

    def log_evaluate_save(self, update: dict[str, Any]) -> None:
        """Logs, evaluates and saves where the callbacks ask for it after an update."""
        if self.control.should_log:
            updates, self.last_log = self.state.global_step - self.last_log, self.state.global_step
            loss = self.accelerator.reduce(self.unlogged_loss, reduction="mean").item() / updates
            self.unlogged_loss.zero_()
            norm = {} if update["grad_norm"] is None else {"grad_norm": update["grad_norm"]}
            self.store_flos()
            self.log({"loss": loss, **norm, "learning_rate": update["learning_rate"]})
        if self.control.should_evaluate:
            metrics = self.evaluate()
            is_best = self._note_best(metrics)
            if self.args.save_strategy == SaveStrategy.BEST:
                self.control.should_save = is_best
        if self.control.should_save:
            self.save_checkpoint()

    def _note_best(self, metrics: dict[str, float]) -> bool:
        """Whether an evaluation is the best so far; a schedule that waits for a plateau hears of it too."""
        if self.args.metric_for_best_model is None:
            return False
        name = f"eval_{self.args.metric_for_best_model.removeprefix('eval_')}"
        if name not in metrics:
            raise ValueError(f"metric_for_best_model={name!r} is none of the evaluation's {sorted(metrics)}.")
        value, best = metrics[name], self.state.best_metric
        if isinstance(self.lr_scheduler, ReduceLROnPlateau):
            self.lr_scheduler.step(value)
        is_best = best is None or (value > best if self.args.greater_is_better else value < best)
        if is_best:
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step
        return is_best

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def save_checkpoint(self) -> None:
        """Saves checkpoint-<updates> in output_dir: the model, the progress and all else that the next update needs."""
        with self.checkpoints.saving():
            self._write_checkpoint(Path(str(self.args.output_dir), f"checkpoint-{self.state.global_step}"))
        self._notify("on_save")
        if self.args.push_to_hub and self.args.hub_strategy != HubStrategy.END:
            self.push_to_hub(f"Updates done: {self.state.global_step}", blocking=False)

    def _write_checkpoint(self, folder: Path) -> None:
        self.save_model(str(folder), _internal_call=True)
        if not self.args.save_only_model:
            without_weights = self.accelerator.register_save_state_pre_hook(lambda models, weights, _: weights.clear())
            self.accelerator.save_state(str(folder))
            without_weights.remove()
            if self.args.should_save:
                torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULE)
        if self.args.should_save:
            self.state.save_to_json(str(folder / STATE))
            (folder / PROGRESS).write_text(json.dumps(asdict(self.progress)))

    def load_state(self, folder: Path) -> None:
        """Puts the run where `save_checkpoint` left it."""
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:  # accelerate holds the shards of the weights
            self.accelerator.load_state(str(folder))
        else:
            load_weights(self.model, folder)
            index, scaler = self.args.process_index, self.accelerator.scaler
            load_accelerator_state(str(folder), [], [self.optimizer], [], [], index, scaler, "cpu")
        # accelerate would unpickle the state of a schedule that it saves, and with it any code that the file holds.
        schedule = folder / SCHEDULE if (folder / SCHEDULE).exists() else folder / "custom_checkpoint_0.pkl"
        self.lr_scheduler.load_state_dict(torch.load(schedule, weights_only=True))
        self.state = TrainerState.load_from_json(str(folder / STATE))
        self.progress = Progress(**json.loads((folder / PROGRESS).read_text()))

    def _notify(self, event: str) -> None:
        self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control)
