"""Training processes, forked from one that has imported everything, and the ways to kill them.

A forked process has its own number, memory and files, and dies alone. Unlike a new interpreter, it does not spend its
first seconds on imports, before the run exists.
"""

import atexit
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NoReturn

from tools.chaos import works

KINDS = ("random", "save", "sigterm")
"""SIGKILL at a random moment; SIGKILL while a checkpoint is unfinished; SIGTERM at a random moment."""
ENDS = (0, 1, 75, 143, -signal.SIGKILL, -signal.SIGTERM)
"""Statuses with which processes may end: success, an error, the reward limit's status, or a signal."""

GRACE = 15.0
"""Seconds between the end of one process and the killing of the others."""


@dataclass
class Group:
    """The processes of one start of a run.

    Attributes:
        ended: number of processes that outlived one that failed, and that this object killed as a launcher does.
    """

    folder: Path
    pids: list[int]
    ended: int = 0

    @classmethod
    def start(cls, work: str, folder: Path, *, size: int, tracker: str) -> "Group":
        """Forks the processes; each prints to folder/log-<rank>.txt."""
        with socket.create_server(("localhost", 0)) as unused:
            port = unused.getsockname()[1]
        pids = []
        for rank in range(size):
            if not (pid := os.fork()):
                if size > 1:
                    group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
                    os.environ |= {name: str(value) for name, value in group.items()}
                    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
                _be(work, folder, rank, tracker)
            pids.append(pid)
        return cls(folder, pids)

    def wait(self, seconds: float) -> list[int]:
        """Waits for the processes and returns their statuses.

        As a launcher does, kills the processes that are left `GRACE` seconds after one has ended. Most fail before, at
        a broken connection; a process that has not yet connected waits for the others.

        Raises:
            TimeoutError: no process has ended after `seconds`.
        """
        deadline, statuses = time.monotonic() + seconds, dict[int, int]()
        while len(statuses) < len(self.pids):
            for pid in self.pids:
                if pid not in statuses and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    statuses[pid] = os.waitstatus_to_exitcode(ended[1])
                    deadline = min(deadline, time.monotonic() + GRACE)
            if time.monotonic() > deadline:
                left = [pid for pid in self.pids if pid not in statuses]
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                    statuses[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                self.ended = len(left)
                if len(left) == len(self.pids):
                    raise TimeoutError(f"{self.folder}: the processes were still running after {seconds:.0f} s.")
            time.sleep(0.002)
        return [statuses[pid] for pid in self.pids]

    def strike(self, kind: str, random: Random, *, longest: float) -> bool:
        """Sends a random process its signal; returns False if that process ends first.

        Args:
            kind: one of KINDS.
            random: generator that chooses the process and the moment.
            longest: maximum seconds until the moment.
        """
        pid, moment = random.choice(self.pids), time.monotonic() + random.uniform(0, longest)
        skipped, delay = random.randrange(3), random.uniform(0, 0.02)
        saves = _Saves(self.folder / "checkpoints", skipped)
        while not (saves.is_inside() if kind == "save" else time.monotonic() > moment):
            if _has_ended(pid):
                return False
            time.sleep(0.0002)
        if kind == "save":
            time.sleep(delay)
        if _has_ended(pid):
            return False
        os.kill(pid, signal.SIGTERM if kind == "sigterm" else signal.SIGKILL)
        return True


class _Saves:
    """Watches a folder for unfinished checkpoints, and skips the first few."""

    def __init__(self, root: Path, skipped: int) -> None:
        self.root, self.skipped, self.last = root, skipped, ""

    def is_inside(self) -> bool:
        """Whether a checkpoint is unfinished now, not counting the skipped ones."""
        unfinished = self._unfinished()
        if unfinished and unfinished != self.last:
            self.skipped -= 1
        self.last = unfinished
        return bool(unfinished) and self.skipped < 0

    def _unfinished(self) -> str:
        try:
            names = os.listdir(self.root)
        except FileNotFoundError:
            return ""
        for name in names:
            if name.endswith(".partial"):
                return name
        return ""


def _has_ended(pid: int) -> bool:
    """Whether a child process has ended; leaves it to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _be(work: str, folder: Path, rank: int, tracker: str) -> NoReturn:
    """Trains in a forked process."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true"}
    os.environ["WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL"] = "0.02"  # a step of these runs takes less than a second
    end_as(lambda: works.run(work, folder, tracker), log=folder / f"log-{rank}.txt")


def end_as(program: Callable[[], object], *, log: Path) -> NoReturn:
    """Runs a program in a forked process, sends its output to a file, and ends the process as an interpreter would.

    This also runs the parent's atexit functions, so the parent must not own a TemporaryDirectory.
    """
    status = 0
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        program()
    except KeyboardInterrupt:
        status = 130
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException as error:
        traceback.print_exc()
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
