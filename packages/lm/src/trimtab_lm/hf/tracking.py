"""Tables, W&B's runs and the ends of trackers, for the trainers on `transformers.Trainer`."""

import os
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback, WandbCallback

from trimtab_common.interruption import status_of
from trimtab_common.tracking import MAX_TABLE_ROWS, cell, cell_type
from trimtab_common.weights_and_biases import STEP_AXIS, OfflineFile, finish_wandb, import_wandb, init_wandb
from trimtab_common.writers import markdown_table


class Tables:
    """Tables of a step's samples, in the trackers that `report_to` names (wandb, tensorboard)."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, list[str], Sequence[Sequence[object]]]] = []  # until a W&B run exists

    def add(self, trainer: Trainer, name: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Log rows under the current step; processes other than the main one do nothing."""
        if not trainer.is_world_process_zero():
            return
        step = trainer.state.global_step
        kept = zip(range(MAX_TABLE_ROWS), rows, strict=False)
        cells: list[list[object]] = [[step, *(cell(value, cell_type(value)) for value in row)] for _, row in kept]
        columns = ["step", *columns]
        if "wandb" in (trainer.args.report_to or []):
            self._to_wandb(name, columns, cells, step)
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
                callback.tb_writer.add_text(name, markdown_table(columns, cells), step)

    def _to_wandb(self, name: str, columns: list[str], rows: Sequence[Sequence[object]], step: int) -> None:
        wandb = import_wandb()
        self._waiting.append((name, columns, rows))
        if wandb.run is None:  # evaluate() before train(): transformers starts its run with the first log
            return
        for name, columns, rows in self._waiting:
            table = wandb.Table(columns=columns, data=rows)
            wandb.log({name: table, STEP_AXIS: step})
        self._waiting.clear()


class WandbRun(WandbCallback):
    """transformers' W&B callback, in a run that bears the id of this run, so that a resumed one goes on in it.

    Args:
        trainer: a TrainerAdapter. Its `about` joins the settings that transformers logs.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.trainer = trainer
        self.file: OfflineFile | None = None

    def setup(self, args: TrainingArguments, state: TrainerState, model: Any, **kwargs: Any) -> None:
        wandb = import_wandb()
        if state.is_world_process_zero and state.trial_name is None and wandb.run is None:
            record, environment = self.trainer.checkpoints.run, os.environ
            run_id = None if record is None or "WANDB_RUN_ID" in environment else record.id or None
            name = environment.get("WANDB_NAME", args.run_name)
            place = {"project": environment.get("WANDB_PROJECT", args.project), "name": name, "id": run_id}
            init_wandb(place, self.trainer.about, Path(), resumes=state.global_step > 0)
        elif state.is_world_process_zero and wandb.run is not None:
            wandb.config.update(dict(self.trainer.about), allow_val_change=True)
        super().setup(args, state, model, **kwargs)
        if wandb.run is not None:
            self.file = OfflineFile(wandb.run)

    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, logs: Any = None, **kwargs: Any) -> None:
        super().on_log(args, state, control, model, logs, **kwargs)
        if self.file is not None:
            self.file.check()


def prepare_trackers(trainer: Trainer) -> None:
    """Takes the place of transformers' W&B callback; a trial of a search without a key is offline, and asks nothing."""
    if trainer.pop_callback(WandbCallback) is None:
        return
    trainer.add_callback(WandbRun(trainer))
    if os.environ.get("WANDB_MODE") or trainer.args.process_index != 0:
        return
    wandb = import_wandb()
    if wandb.run is None and not wandb.login(prompt=False, verify=False):
        os.environ["WANDB_MODE"] = "offline"
        wandb.teardown()  # the login has read the environment, once and for all


def close_trackers(trainer: Trainer, status: int) -> None:
    """Close W&B's run and flush TensorBoard's files, before a signal ends the process with an exit status.

    After SIGINT W&B's run stays open: a notebook goes on with it, and W&B itself closes it as failed when the process
    ends.
    """
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
            callback.tb_writer.flush()
    if status == status_of(signal.SIGINT) or "wandb" not in (trainer.args.report_to or []):
        return
    wandb = import_wandb()
    if wandb.run is not None:
        finish_wandb(wandb.run, status)
