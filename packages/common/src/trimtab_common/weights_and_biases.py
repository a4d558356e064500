"""Weights & Biases: opens and closes runs, online or offline, and writes what a `Tracker` logs."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from accelerate.tracking import WandBTracker
from PIL import Image

from trimtab_common.interruption import exit_at_sigterm, is_preemption
from trimtab_common.writers import Writer

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

STEP_AXIS = "train/global_step"
"""The statistic that W&B draws all others over; transformers' trainers have the same one."""


class WandbWriter(Writer, WandBTracker):
    """Writes to a new run, or to an open one, which then stays open.

    Args:
        resumes: whether a checkpoint named the run.
    """

    def __init__(
        self, kwargs: dict[str, Any], config: Mapping[str, object], folder: Path, *, resumes: bool = False
    ) -> None:
        wandb = import_wandb()
        self.accelerate, self._wandb = self, wandb
        self._owned = wandb.run is None
        self._latest = self._shift = 0  # a step, and from a step to its row
        config = {**config, **wandb.helper.parse_config(kwargs.pop("config", None) or {})}
        if wandb.run is None:
            self.run: Run = init_wandb(kwargs, config, folder, resumes=resumes)
            exit_at_sigterm(exits=True)
        else:
            self.run = wandb.run
            self.describe(config)
        self._file = OfflineFile(self.run)
        self.run.define_metric(STEP_AXIS)
        self.run.define_metric("*", step_metric=STEP_AXIS, step_sync=True)

    def describe(self, settings: Mapping[str, object]) -> None:
        self.run.config.update(dict(settings), allow_val_change=True)

    def stats(self, scalars: dict[str, float], histograms: dict[str, np.ndarray], step: int) -> None:
        values = {name: self._wandb.Histogram(np_histogram=histogram(array)) for name, array in histograms.items()}
        self._log({**scalars, **values}, step)

    def table(self, name: str, columns: list[str], types: list[type], rows: list[list[Any]], step: int) -> None:
        self._log({name: self._wandb.Table(columns=[*columns], data=rows, dtype=types, optional=True)}, step)

    def images(self, name: str, images: list[Image.Image], captions: list[str], step: int) -> None:
        logged = [self._wandb.Image(image, caption=text) for image, text in zip(images, captions, strict=True)]
        self._log({name: logged}, step)

    def end(self, summary: dict[str, float], exit_code: int) -> None:
        self.run.summary.update(summary)
        if self._owned:
            exit_at_sigterm(exits=False)
            finish_wandb(self.run, exit_code)

    def _log(self, values: dict[str, object], step: int) -> None:
        # A run resumed from a checkpoint repeats steps that W&B has seen; its own counter must not go back.
        self.run.log({**values, STEP_AXIS: step}, step=max(step + self._shift, self.run.step))
        self._latest = step
        self._file.check()

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """Writes a separate row at any step; values that `_log` gets afterwards go to later rows."""
        row = self.run.step + 1
        self.run.log({**values, STEP_AXIS: self._latest if step is None else step}, step=row)
        self._shift = row + 1 - self._latest


def histogram(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts finite values in 64 bins of equal width; puts values that differ by rounding alone into one bin."""
    limit = np.finfo(np.float64).max / 4  # the width of the range stays finite
    values = values.clip(-limit, limit)
    low, high = values.min(), values.max()
    if high - low <= max(1e-12 * max(abs(low), abs(high)), 1e-300):  # numpy refuses bins without a width
        margin = max(0.5, 1e-6 * abs(low))
        return np.histogram(values, bins=64, range=(low - margin, high + margin))
    return np.histogram(values, bins=64)


class OfflineFile:
    """The file of an offline run, the one record of what was logged.

    Args:
        run: an open W&B run; nothing is checked of an online one, whose record is with the server.
    """

    def __init__(self, run: Run) -> None:
        self._path = Path(run.settings.sync_file) if run.offline else None
        self._was_there = False  # W&B creates it some time after the start

    def check(self) -> None:
        """Warns once when the file has disappeared."""
        if self._path is None:
            return
        is_there = self._path.exists()
        if self._was_there and not is_there:
            warnings.warn(
                f"{self._path} was deleted: W&B records nothing more of this offline run. Training goes on; stop it "
                "and resume it from a checkpoint to begin a new file.",
                stacklevel=4,
            )
            self._path = None
        self._was_there = is_there


def finish_wandb(run: Run, exit_code: int) -> None:
    """Closes a W&B run. Marks a preempted run, so that a W&B sweep gives it to an agent again."""
    if is_preemption(exit_code):
        run.mark_preempting()
    run.finish(exit_code=exit_code)


def import_wandb() -> ModuleType:
    """Returns the wandb module, after setting defaults that the environment does not set.

    It sends no reports of its errors and its use. It writes what was logged to the run's file within a second instead
    of 15: its service ends with a process that is killed, and loses what it has not written.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", "1")
    import wandb

    return wandb


def init_wandb(kwargs: dict[str, Any], config: Mapping[str, object], folder: Path, *, resumes: bool = False) -> Run:
    """Opens a run, offline without an API key, and says how to upload it; nothing is asked at the terminal.

    Args:
        kwargs: arguments of `wandb.init` except `config`; `id` None: WANDB_RUN_ID, or a new one.
        config: the run's settings.
        folder: W&B writes to folder/wandb, unless `kwargs` has a `dir` or WANDB_DIR is set.
        resumes: whether the run goes on from a checkpoint; it warns if its offline files are gone.

    Raises:
        RuntimeError: the mode is online, and there is no key.
    """
    wandb = import_wandb()
    mode = kwargs.get("mode") or os.environ.get("WANDB_MODE")
    reason = f"mode {mode}"
    if mode in (None, "online", "shared") and not wandb.login(prompt=False, verify=False):
        if mode is not None:
            raise RuntimeError(f"W&B's mode is {mode} without an API key. Set WANDB_API_KEY or WANDB_MODE=offline.")
        mode, reason = "offline", "no API key"
    quiet = {"settings": wandb.Settings(silent=True)} if mode == "offline" else {}
    run_id = kwargs["id"] or os.environ.get("WANDB_RUN_ID")
    place = Path(kwargs.get("dir") or os.environ.get("WANDB_DIR") or folder)
    place.mkdir(parents=True, exist_ok=True)  # wandb would quietly use a temporary folder instead
    settled = {"dir": str(place), "config": dict(config), "id": run_id, "mode": mode}
    run = wandb.init(**{"resume": "allow", **quiet, **kwargs, **settled})
    if mode == "offline":
        command = f"wandb sync {run.settings.sync_dir}"
        print(f"W&B run {run.id} is offline ({reason}); upload it later with: {command}", file=sys.stderr)
        present = Path(run.settings.sync_dir)
        if resumes and not [one for one in present.parent.glob(f"*run-*-{run.id}") if one != present]:
            warnings.warn(
                f"{present.parent} has no files of the resumed W&B run {run.id}: they were deleted, or are elsewhere. "
                "The new files begin with this resume.",
                stacklevel=4,
            )
    return run
