"""Runs sessions of tiny trainings that receive a signal at a chosen place: each line of stdin is one, as JSON.

A session runs in its own process, forked from this one, and continues from the newest checkpoint in its folder:

    {"work": a name of tools.chaos.works, "folder": ..., "signals": [names], "place": update | reward | save,
     "at": the count of the place's visits, "settings": of the trainer, "tracker": ..., "environment": {name: value}}

For each session the program prints its process's exit status, negative if a signal killed it. A session given as an
argument runs in this process; with several processes, the last one gets the signals.
"""

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tools.chaos import works
from tools.chaos.processes import end_as
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trimtab_common import checkpoint, sealing
from trimtab_lm.hf import checkpoints


def signal_at(place: str, at: int, signals: list[str]) -> None:
    """Sends signals to this process at the `at`-th visit to a place, at least a second apart."""
    visits = 0

    def visit() -> None:
        nonlocal visits
        visits += 1
        if visits == at:
            for number, name in enumerate(signals):
                time.sleep(1.2 * bool(number))
                os.kill(os.getpid(), getattr(signal, name))

    def visited(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            visit()
            return function(*args, **kwargs)

        return call

    if place == "update":
        register_optimizer_step_pre_hook(lambda *_: visit())
    elif place == "reward":
        works.noise = visited(works.noise)
    elif place == "save":
        for module in (checkpoint, checkpoints):
            module.publish = visited(sealing.publish)  # type: ignore[attr-defined]


def run(session: dict[str, Any]) -> None:
    """Runs a session in this process."""
    os.environ |= session.get("environment", {})
    if "signals" in session and int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1:
        signal_at(session["place"], session["at"], session["signals"])
    works.run(session["work"], Path(session["folder"]), session.get("tracker", "none"), **session.get("settings", {}))


def status_of(session: dict[str, Any]) -> int:
    """Runs a session in its own process; returns the exit status."""
    folder = Path(session["folder"])
    folder.mkdir(exist_ok=True)
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    end_as(lambda: run(session), log=folder / "log.txt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("always")
    if len(sys.argv) > 1:
        run(json.loads(sys.argv[1]))
    else:
        for line in sys.stdin:
            print(status_of(json.loads(line)), flush=True)
