"""Trials that are forked from a process that has imported their modules once: trimtab sweep FILE --preload MODULE

`Preloaded` starts that process and asks it, in lines of JSON, to fork a trial or for a trial's exit status. A forked
trial is a process like any other, with a group, environment, log and exit of its own.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from trimtab_cli.sweep.distributions import SweepError
from trimtab_cli.sweep.store import try_lock

UNSHARED = {"datasets", "wandb"}


class Preloaded:
    """The process that trials are forked from.

    Args:
        modules: The names of the modules that it imports.
        env: Its variables, which some libraries read as they are imported.
    """

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self._modules = modules
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *modules],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # Ctrl-C reaches the sweep alone
        )

    def start(self, words: Sequence[str], env: Mapping[str, str], log: Path) -> Forked:
        """Starts a trial; `words` are the program's file and its arguments, `env` the variables that it adds."""
        return Forked(self, self.ask({"words": list(words), "env": dict(env), "log": str(log)}))

    def ask(self, request: object) -> Any:
        """The answer to one request of `serve`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)
        if not (answer := self._process.stdout.readline()):
            raise SweepError(f"--preload: the process that imports {', '.join(self._modules)} has ended, see above.")
        return json.loads(answer)

    def close(self) -> None:
        """Ends the process, which ends no trial."""
        self._process.communicate()


class Forked:
    """A trial's process, with the part of Popen's interface that a sweep needs."""

    def __init__(self, server: Preloaded, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit status, the negative number of the signal that ended the process, or None while it runs."""
        if self._code is None:
            self._code = self._server.ask(self.pid)
        return self._code

    def terminate(self) -> None:
        """Sends SIGTERM."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def serve(modules: Sequence[str], requests: IO[str], answers: IO[str]) -> dict[str, Any] | None:
    """Imports the modules, and forks trials until `requests` ends. Returns None, and in a trial what it is to run."""
    for name in modules:
        importlib.import_module(name)
    if UNSHARED & sys.modules.keys() or threading.active_count() > 1:
        raise RuntimeError(
            f"--preload {' '.join(modules)}: they import wandb or datasets, whose temporary folders and random numbers "
            "are for one process, or they start a thread, which a fork lacks. Name modules that do without."
        )
    gc.freeze()  # a trial's collector, and its exit, need not go through what was imported
    for line in requests:
        request = json.loads(line)
        if isinstance(request, int):
            pid, status = os.waitpid(request, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            with open(request["log"], "w") as log:
                try_lock(log)  # as `launch.start` does it
                answer = os.fork()
                if answer == 0:
                    answers.close()
                    enter(request["env"], log)
                    return request
        print(json.dumps(answer), file=answers, flush=True)
    return None


def enter(env: Mapping[str, str], log: IO[str]) -> None:
    """Gives a forked process its group, files, variables and random numbers."""
    os.setpgid(0, 0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    os.environ.update(env)
    if random := sys.modules.get("numpy.random"):
        random.seed()  # as in a new process, which draws numbers of its own


def run_program(words: Sequence[str]) -> None:
    """Runs a Python file with arguments as `python` does."""
    sys.argv = list(words)
    program = Path(words[0]).absolute()
    if not sys.flags.safe_path:
        sys.path[0] = str(program.parent)
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = str(program)
    exec(compile(program.read_bytes(), program, "exec"), vars(module))


def main() -> None:
    """Serves the sweep that started this process, and runs the trial's program in a fork of it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the imports print is no answer
    if trial := serve(sys.argv[1:], sys.stdin, answers):
        run_program(trial["words"])


if __name__ == "__main__":
    main()
