"""The printed lines of a trainer on `transformers.Trainer`, in place of its dicts, and its bars on a terminal."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers import TrainingArguments as Arguments

from trimtab_common.lines import Lines


class LinesCallback(TrainerCallback):
    """Prints a line for each log.

    Args:
        watched: names of the statistics to print.
    """

    def __init__(self, watched: Sequence[str]) -> None:
        super().__init__()
        self.watched = watched
        self.lines = Lines("step", watched, total=0)

    def on_train_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.lines = Lines("step", self.watched, total=state.max_steps or 0, done=state.global_step)

    def on_log(
        self,
        args: Arguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if state.is_world_process_zero and logs and "train_runtime" not in logs:  # which repeats what was shown
            is_evaluation = any(name.startswith("eval_") for name in logs)
            self.lines.show(state.global_step, logs, prefix="eval_" if is_evaluation else "")


class BarsCallback(LinesCallback, ProgressCallback):
    """The same, above the bars of transformers."""


def show_lines(trainer: Trainer, watched: Sequence[str]) -> None:
    """Replaces transformers' prints and bars; a notebook keeps its table, and a run without a terminal has no bars."""
    if trainer.pop_callback(PrinterCallback) is not None:
        trainer.add_callback(LinesCallback(watched))
    elif trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback((BarsCallback if sys.stderr.isatty() else LinesCallback)(watched))
