"""Connects a run's tracker to `accelerator.log`, `accelerator.trackers` and `accelerator.get_tracker`."""

from collections.abc import Mapping
from typing import Any

from accelerate.tracking import GeneralTracker

from trimtab_common.run import Run


class RunTracker(GeneralTracker):
    """Has the methods of accelerate's tracker of this name.

    It starts nothing by itself: the run's tracker starts at its first use, so that a resumed run keeps its id.
    """

    requires_logging_directory = False

    def __init__(self, run: Run, name: str) -> None:
        self.name, self.owner = name, run

    @property
    def tracker(self) -> Any:
        accelerate = self.owner.tracker.accelerate
        return None if accelerate is None else accelerate.tracker

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.owner.tracker.describe(values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs separate rows, whose step may differ from the trainer's."""
        self.owner.tracker.row(values, step, **kwargs)

    def finish(self) -> None:
        self.owner.tracker.finish()

    def __getattr__(self, name: str) -> Any:
        tracker = self.owner.tracker.accelerate
        return (lambda *args, **kwargs: None) if tracker is None else getattr(tracker, name)


def trackers_of(run: Run, log_with: str | None) -> list[GeneralTracker]:
    """The list that accelerate's methods read; empty without a tracker."""
    return [] if log_with in (None, "none") else [RunTracker(run, log_with)]
