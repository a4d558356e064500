"""A run's tracker as accelerate's trackers: for `accelerator.log`, `accelerator.trackers` and `get_tracker`.

Trainers log to `run.tracker`. What a program sends through the trainer's accelerator goes to the same W&B run or
TensorBoard folder.
"""

from collections.abc import Mapping
from typing import Any

from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker

from trimtab_common.run import Run


class _OfRun(GeneralTracker):
    """Starts nothing by itself: the run's tracker starts at its first use, so that a resumed run keeps its id."""

    def __init__(self, run: Run) -> None:
        GeneralTracker.__init__(self)
        self.owner = run

    @property
    def tracker(self) -> Any:
        return self.owner.tracker.native

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.owner.tracker.describe(values)

    def finish(self) -> None:
        self.owner.tracker.finish()


class RunTensorBoard(_OfRun, TensorBoardTracker):
    """Logs to the run's folder of events."""

    @property
    def writer(self) -> Any:
        return self.tracker

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        super().log(dict(values), step=self.owner.tracker.step if step is None else step, **kwargs)


class RunWandb(_OfRun, WandBTracker):
    """Logs rows of their own, whose step may be behind or ahead of the trainer's."""

    @property
    def run(self) -> Any:
        return self.tracker

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        self.owner.tracker.row(values, self.owner.tracker.step if step is None else step)


def trackers_of(run: Run, log_with: str | None) -> list[GeneralTracker]:
    """The list that accelerate's methods read; empty without a tracker."""
    kinds: dict[str | None, type[_OfRun]] = {"tensorboard": RunTensorBoard, "wandb": RunWandb}
    return [kinds[log_with](run)] if log_with in kinds else []
