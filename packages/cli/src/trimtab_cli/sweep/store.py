"""A sweep's folder: what it is (sweep.json), what its trials gave (trials.jsonl), and their logs."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import secrets
import string
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from trimtab_cli.sweep.distributions import SweepError
from trimtab_cli.sweep.spec import Sweep

RUNNING, INTERRUPTED, FINISHED, STOPPED, FAILED = "running", "interrupted", "finished", "stopped", "failed"
# What makes it the same sweep; the rest of the file may change between two calls.
SAME = ("method", "metric", "parameters", "program", "command", "early_terminate")


@dataclass
class Trial:
    """One line of trials.jsonl."""

    number: int
    parameters: dict[str, Any]
    point: dict[str, Any] = field(default_factory=dict)  # where Bayesian search has it
    run_id: str = ""
    status: str = INTERRUPTED  # running, interrupted (to be run again), finished, stopped early, failed
    metric: float | None = None
    seconds: float | None = None
    message: str = ""  # why it was stopped, or failed, with the end of its log
    log: str = ""
    run_file: str = ""  # W&B's file, once it was seen


class Store:
    """The folder of one sweep. Only one process has it at a time."""

    def __init__(self, folder: Path, sweep: Sweep, *, seed: int | None = None, sweep_id: str | None = None) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / "lock").open("w")
        if not try_lock(self._lock):
            raise SweepError(
                f"{folder}: another process runs this sweep. Wait for it, or give this one its own --folder."
            )
        about = self._about(sweep, seed, sweep_id)
        self.sweep_id: str = about["id"]
        self.seed: int = about["seed"]
        self.trials: list[Trial] = []
        if (trials := self.folder / "trials.jsonl").exists():
            lines = trials.read_text(encoding="utf-8").splitlines()
            self.trials = [Trial(**json.loads(line)) for line in lines]

    def save(self) -> None:
        """Write trials.jsonl anew; a crash leaves the old one or the new one."""
        lines = [json.dumps(dataclasses.asdict(trial)) + "\n" for trial in self.trials]
        write_atomically(self.folder / "trials.jsonl", "".join(lines))

    def log_of(self, trial: Trial) -> Path:
        """The file that a trial prints into."""
        return self.folder / "logs" / f"{trial.number:04d}-{trial.run_id}.log"

    def close(self) -> None:
        """Let other processes have the sweep."""
        self._lock.close()

    def _about(self, sweep: Sweep, seed: int | None, sweep_id: str | None) -> dict[str, Any]:
        path, config = self.folder / "sweep.json", json.loads(json.dumps(sweep.source))
        if not path.exists():
            about = {"id": sweep_id or new_id(), "seed": seed or 0, "config": config}
            write_atomically(path, json.dumps(about, indent=2) + "\n")
            return about
        about = json.loads(path.read_text(encoding="utf-8"))
        changed = [key for key in SAME if about["config"].get(key) != config.get(key)]
        changed += [
            f"--{name}"
            for name, new, old in (("seed", seed, "seed"), ("sweep-id", sweep_id, "id"))
            if new is not None and new != about[old]
        ]
        if changed:
            raise SweepError(
                f"{self.folder} holds a sweep that differs in {', '.join(changed)}. Undo the change to go on with it, "
                "or give this sweep another `name` or --folder."
            )
        return about


def new_id() -> str:
    """Eight letters and digits, as W&B names sweeps and runs."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))


def try_lock(file: TextIO) -> bool:
    """Lock an open file; the lock lasts until every process that got the open file has closed it or ended."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a crash leaves the old one or the new one."""
    beside = path.with_name(path.name + ".new")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
