"""Statistics between logs, and tables, for the trackers of the trainers on `transformers.Trainer`."""

import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import Trainer, TrainingArguments
from transformers.integrations import TensorBoardCallback

from trimtab_common.interruption import status_of
from trimtab_common.stats import gather_stats, merge_stats
from trimtab_common.tracking import MAX_TABLE_ROWS, cell, cell_type
from trimtab_common.weights_and_biases import STEP_AXIS, finish_wandb, import_wandb
from trimtab_common.writers import markdown_table


class Recorder:
    """Statistics of micro-batches until they are logged, separate for training and evaluation.

    Weighted means (`trimtab_common.stats.Mean`) are merged over everything recorded in all processes.
    """

    def __init__(self) -> None:
        self._parts: dict[bool, list[dict[str, object]]] = {True: [], False: []}

    def add(self, stats: Mapping[str, object], *, training: bool) -> None:
        """Record statistics.

        Args:
            stats: Mean, Variance, Deviation, Correlation or 1-D tensors; plain numbers are averaged over the calls.
            training: whether they belong to training, or to evaluation.
        """
        parts = self._parts[training]
        parts.append(dict(stats))
        if len(parts) == 64:
            parts[:] = [merge_stats(parts)]

    def flush(self, *, training: bool) -> dict[str, Any]:
        """The statistics since the last flush, over all processes. Collective."""
        parts, self._parts[training] = self._parts[training], []
        return gather_stats(merge_stats(parts))


class Tables:
    """Tables of a step's samples, in the trackers that `report_to` names (wandb, tensorboard)."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, list[str], Sequence[Sequence[object]]]] = []  # for a W&B run to go to

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


def prepare_trackers(args: TrainingArguments) -> None:
    """Let W&B run offline if `report_to` names it and there is no key, instead of asking at the terminal."""
    if "wandb" not in (args.report_to or []) or os.environ.get("WANDB_MODE") or args.process_index != 0:
        return
    wandb = import_wandb()
    if wandb.run is None and not wandb.login(prompt=False, verify=False):
        os.environ["WANDB_MODE"] = "offline"
        wandb.teardown()  # the login has read the environment, once and for all
        print("W&B has no API key: the run is offline in ./wandb; upload it later with: wandb sync", file=sys.stderr)


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
