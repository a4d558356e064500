"""Sends a run's numbers, tables and images to Weights & Biases, to another tracker of accelerate's, or nowhere."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from tqdm.auto import tqdm

from trimtab_common.images import Picture, to_pil
from trimtab_common.interruption import status_of
from trimtab_common.weights_and_biases import STEP_AXIS, WandbWriter
from trimtab_common.writers import Cell, MLflowWriter, TensorBoardWriter, Writer

TRACKERS = (*LOGGER_TYPE_TO_CLASS, "none")
MAX_TABLE_ROWS = 32  # of a call
MAX_CELL_CHARACTERS = 2000
METRICS_FILE = "TRIMTAB_METRICS"
"""The environment variable that names a file of JSON lines. Each log of numbers adds a line, even without a tracker."""

T = TypeVar("T")
Stats = Mapping[str, object]


def check_tracker_name(name: str | None) -> str:
    """Returns the tracker's name, "none" for None.

    Raises:
        ValueError: the name is unknown.
        ImportError: the tracker's package is missing.
    """
    chosen = "none" if name is None else name
    if chosen not in TRACKERS:
        raise ValueError(f"log_with={name!r} is not a tracker of trimtab. Choose one of {', '.join(TRACKERS)}.")
    require_package(chosen, "log_with")
    return chosen


def require_package(tracker: str, setting: str) -> None:
    """Raises ImportError if accelerate knows the tracker but its package is missing; `setting` is what names it."""
    if tracker in LOGGER_TYPE_TO_CLASS and tracker not in map(str, get_available_trackers()):
        raise ImportError(f"{setting}={tracker!r} needs its package: pip install {tracker}")


def start_tracking(
    log_with: str | None,
    *,
    project: str,
    config: Stats,
    name: str | None = None,
    group: str | None = None,
    job_type: str = "train",
    tags: Sequence[str] = (),
    folder: str | Path = ".",
    run_id: str | None = None,
    init_kwargs: Mapping[str, Any] | None = None,
    is_main: bool = True,
) -> Tracker:
    """Starts a tracker's run, or resumes the run with the id `run_id`.

    Use it as a context manager, so that the run is always finished. W&B needs no account: without a key the run is
    offline. WANDB_MODE (online, offline, disabled) is obeyed, and nothing is asked at the terminal. A wandb run that is
    already open is used, and left open.

    Args:
        log_with: the name of a tracker that accelerate knows, such as "wandb" or "mlflow"; "none" or None.
        project: the tracker's project; MLflow's experiment. WANDB_PROJECT takes precedence in W&B.
        config: the run's settings by name, plain values.
        name: the run's name, where accelerate takes one. WANDB_NAME takes precedence in W&B.
        group: W&B's group of runs; None: WANDB_RUN_GROUP.
        job_type: W&B's type of the run. WANDB_JOB_TYPE takes precedence.
        tags: W&B's tags. Without any: WANDB_TAGS.
        folder: W&B writes to folder/wandb, TensorBoard to folder/tensorboard, Aim to folder/aim. WANDB_DIR takes
            precedence in W&B.
        run_id: the id that a checkpoint holds; W&B, TensorBoard, trackio and MLflow go on with its run, others begin a
            new one. Without it W&B takes WANDB_RUN_ID, or draws one. Under a sweep agent W&B always takes the agent's
            id, so that the sweep sees its run; `Tracker.run_id` is the one in use.
        init_kwargs: more arguments of `wandb.init`, TensorBoard's `SummaryWriter` or accelerate's tracker, as they are
            or under the tracker's name; they take precedence. A `config` for W&B is merged into `config`.
        is_main: False on every process but one, where the tracker does nothing.

    Raises:
        ImportError: the tracker's package is missing.
    """
    chosen = check_tracker_name(log_with)
    if not is_main:
        return Tracker(None, run_id, is_main=False)
    folder, options = Path(folder), dict(init_kwargs or {})
    extra = {key: value for key, value in options.items() if key not in TRACKERS} | options.get(chosen, {})
    drawn = run_id or secrets.token_hex(4)
    if chosen == "none":
        return Tracker(None, drawn)
    if chosen == "wandb":
        arguments: dict[str, Any] = {"project": project, "name": name, "job_type": job_type}
        arguments = {key: os.environ.get(f"WANDB_{key.upper()}", value) for key, value in arguments.items()}
        arguments |= {"group": group, "tags": list(tags) or None}
        wandb_writer = WandbWriter({**arguments, "id": run_id, **extra}, config, folder, resumes=run_id is not None)
        return Tracker(wandb_writer, wandb_writer.run.id)
    run_name = re.sub(r"[^\w.-]+", "-", f"{name}-{drawn}" if name else drawn)  # the name of one folder, and no path
    if chosen == "tensorboard":
        return Tracker(TensorBoardWriter({"log_dir": str(folder / chosen / run_name), **extra}, config), drawn)
    kind = LOGGER_TYPE_TO_CLASS[chosen]
    place = [str(folder / chosen)] if kind.requires_logging_directory else []
    names: dict[str, dict[str, Any]] = {
        "trackio": {"name": run_name, "resume": "allow"},
        "mlflow": {"run_name": name, "run_id": run_id},
    }
    write = MLflowWriter if chosen == "mlflow" else Writer
    writer = write(kind(project, *place, **{**names.get(chosen, {}), **extra}), config)
    return Tracker(writer, writer.accelerate.tracker.info.run_id if chosen == "mlflow" else drawn)


def append_metrics(values: Mapping[str, float]) -> None:
    """Appends a line of metrics to the file that TRIMTAB_METRICS names, if any, for a sweep to read."""
    if path := os.environ.get(METRICS_FILE):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")


class Tracker:
    """What trainers log to.

    Args:
        writer: writes to one kind of tracker; None for no tracker, where numbers go to the file of a sweep alone.
        run_id: the id of the tracker's run, for checkpoints; None on other processes of a new run.
        is_main: False on every process but one, where nothing is logged.
    """

    def __init__(self, writer: Writer | None, run_id: str | None, *, is_main: bool = True) -> None:
        self.run_id = run_id
        self.writer = writer
        self._is_open = is_main
        self._step = 0
        self._columns: dict[str, tuple[list[str], list[type]]] = {}

    def describe(self, settings: Stats) -> None:
        """Adds settings to the run, such as the training program's; plain values by name."""
        if self.writer is not None and settings:
            self.writer.describe(settings)

    def log(self, stats: Stats, step: int) -> None:
        """Logs numbers as floats, and 1-D arrays, tensors or lists as histograms of their finite values.

        W&B and TensorBoard have histograms; accelerate's other trackers leave them out.

        Args:
            stats: numbers and columns by name.
            step: the same step may be logged in several calls.

        Raises:
            ValueError: the step is smaller than in an earlier call, or a value is neither a number nor 1-D.
        """
        if not self._takes_numbers:
            return
        self._advance(step)
        scalars, histograms = {}, {}
        for name, value in stats.items():
            array = _to_array(name, value)
            if array.ndim == 0:
                scalars[name] = float(array)
            elif (finite := array[np.isfinite(array)]).size:
                histograms[name] = finite
        append_metrics({**scalars, STEP_AXIS: step})
        if self.writer is not None:
            self.writer.stats(scalars, histograms, step)

    @property
    def accelerate(self) -> Any:
        """Accelerate's tracker, which logs any kind of value at any step; None if there is none."""
        return None if self.writer is None else self.writer.accelerate

    def row(self, values: Mapping[str, Any], step: int | None, **options: Any) -> None:
        """Logs values in a separate row, as accelerate's tracker does; without a step, at the latest step."""
        if not self._takes_numbers:
            return
        step = self._step if step is None else step
        numbers = {name: float(value) for name, value in values.items() if cell_type(value) is not str}
        if numbers:
            append_metrics({**numbers, STEP_AXIS: step})
        if self.writer is not None:
            self.writer.accelerate.log(dict(values), step=step, **options)

    def table(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[object]], step: int) -> None:
        """Logs a table of a step's rows, after a column with the step, if accelerate's tracker has tables.

        W&B shows the table of one step, and all tables together as `runs.history.concat["<name>"]`. One table that
        grows would be uploaded whole at every step.

        Args:
            columns: their names, the same in every call.
            rows: texts, numbers or booleans; the first row fixes the type of each column. Keeps at most MAX_TABLE_ROWS
                rows of a call, and MAX_CELL_CHARACTERS characters of a text.
            step: as for `log`.

        Raises:
            ValueError: the columns differ from the last call's, or the step is smaller.
        """
        if self.writer is None:
            return
        self._advance(step)
        kept = [list(row) for _, row in zip(range(MAX_TABLE_ROWS), rows, strict=False)]
        if not kept:
            return
        known, types = self._columns.setdefault(name, (list(columns), [cell_type(value) for value in kept[0]]))
        if known != list(columns):
            raise ValueError(f"table {name!r} has columns {known}, got {list(columns)}. Use another name for it.")
        cells = [[step, *map(cell, row, types)] for row in kept]
        self.writer.table(name, ["step", *columns], [int, *types], cells, step)

    def images(self, name: str, images: Sequence[Picture], captions: Sequence[str], step: int) -> None:
        """Logs images with captions. Does nothing if accelerate's tracker has no images.

        Args:
            name: the name of the group of images.
            images: PIL images, or arrays [3, H, W] or [H, W, 3], either uint8 or float within [0, 1].
            captions: one for each image.
            step: as for `log`.

        Raises:
            ValueError: the counts differ, an image has another shape or range, or the step is smaller than before.
        """
        if self.writer is None:
            return
        if len(images) != len(captions):
            raise ValueError(f"{name}: {len(images)} images with {len(captions)} captions. Give one caption for each.")
        self._advance(step)
        self.writer.images(
            name, [to_pil(image) for image in images], [text[:MAX_CELL_CHARACTERS] for text in captions], step
        )

    def finish(self, summary: Stats | None = None, exit_code: int = 0) -> None:
        """Closes the run; further calls do nothing.

        Args:
            summary: final numbers, such as a sweep's metric.
            exit_code: the program's exit code, which W&B shows; the code of a preemption marks the run as preempting.
        """
        if not self._takes_numbers:
            return
        results = {name: float(_to_array(name, value)) for name, value in (summary or {}).items()}
        if results:
            append_metrics(results)
        if self.writer is not None:
            self.writer.end(results, exit_code)
        self.writer, self._is_open = None, False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish(exit_code=_status_after(error))

    @property
    def _takes_numbers(self) -> bool:
        return self.writer is not None or (self._is_open and METRICS_FILE in os.environ)

    def _advance(self, step: int) -> None:
        if step < self._step:
            raise ValueError(
                f"step={step} after step={self._step}: trackers drop what goes back in time. "
                "Count steps over the whole run."
            )
        self._step = step


def _status_after(error: BaseException | None) -> int:
    """Returns the exit status of a program that an error ends; 0 without an error."""
    match error:
        case None:
            return 0
        case SystemExit(code=None):
            return 0
        case SystemExit(code=int(code)):
            return code
        case KeyboardInterrupt():
            return status_of(signal.SIGINT)
    return 1


def progress(items: Iterable[T] | int, description: str) -> Iterable[T]:
    """A progress bar over an iterable, or over range(items) for a number; hidden if stderr is not a terminal."""
    iterable: Any = range(items) if isinstance(items, int) else items
    return tqdm(iterable, desc=description, disable=None, dynamic_ncols=True)


def _to_array(name: str, value: object) -> np.ndarray:
    plain = value.detach().float().cpu() if isinstance(value, torch.Tensor) else value
    try:
        array = np.asarray(plain, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"stats[{name!r}] is {value!r}; a number or a 1-D array of numbers is needed.") from error
    if array.ndim > 1:
        raise ValueError(
            f"stats[{name!r}] has shape {array.shape}; flatten it for a histogram or reduce it to a number."
        )
    return array


def cell_type(value: object) -> type:
    """What a cell of a table holds: bool, float or str."""
    if isinstance(value, (bool, np.bool_)):
        return bool
    is_number = isinstance(value, (int, float, np.number)) or (isinstance(value, torch.Tensor) and value.ndim == 0)
    return float if is_number else str


def cell(value: object, kind: type) -> Cell:
    """Converts a value to a table cell of type `cell_type`; cuts texts after MAX_CELL_CHARACTERS; keeps None."""
    if value is None:
        return None
    if kind is not str:
        return kind(value)
    text = str(value)
    return text if len(text) <= MAX_CELL_CHARACTERS else text[: MAX_CELL_CHARACTERS - 1] + "…"
