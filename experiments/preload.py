"""`trimtab sweep` whose trials are forked from a process that has imported their modules once, to save their time.

python -m experiments.preload --preload MODULE [--preload MODULE ...] FILE [flags of trimtab sweep]

`Preloaded` starts that process and asks it, in lines of JSON, to fork a trial or for a trial's exit status. A forked
trial is a process with its own group, environment, log and exit status. A fork cannot use a GPU.
"""

import argparse
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

UNSHARED = {"datasets", "wandb"}
BY_PYTHON = ["/usr/bin/env", "python"]


class Preloaded:
    """The process that trials are forked from, which starts with the first trial.

    Args:
        modules: The names of the modules that it imports.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._process: subprocess.Popen[str] | None = None

    def start(self, words: Sequence[str], env: Mapping[str, str], log: Path) -> "Forked":
        """Starts a trial from the words of its command, its variables and its log."""
        if list(words[:2]) != BY_PYTHON:
            raise SystemExit(f"--preload: the sweep's command has to begin with {' '.join(BY_PYTHON)}, got {words}.")
        if self._process is None:
            server = [sys.executable, "-m", __spec__.name, "--serve", *self._modules]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            # A separate process group, so that Ctrl-C reaches only the sweep.
            self._process = subprocess.Popen(server, env=env, text=True, process_group=0, **pipes)
        return Forked(self, self.ask({"words": list(words[2:]), "env": dict(env), "log": str(log)}))

    def ask(self, request: object) -> Any:
        """The answer to one request of `serve`."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)
        if not (answer := self._process.stdout.readline()):
            raise SystemExit(f"--preload: the process that imports {', '.join(self._modules)} has ended, see above.")
        return json.loads(answer)

    def close(self) -> None:
        """Ends the process, which ends no trial."""
        if self._process is not None:
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


def serve(modules: Sequence[str], requests: IO[str], answers: IO[str]) -> list[str] | None:
    """Imports the modules, and forks trials until `requests` ends. Returns None, and in a trial the words it runs."""
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
            answer = os.fork()
            if answer == 0:
                answers.close()
                enter(request["env"], request["log"])
                return request["words"]
        print(json.dumps(answer), file=answers, flush=True)
    return None


def enter(env: Mapping[str, str], log: str) -> None:
    """Gives a forked process its group, files, variables and random numbers."""
    os.setpgid(0, 0)
    with open(os.devnull) as nothing, open(log, "w") as output:
        for place, file in enumerate((nothing, output, output)):
            os.dup2(file.fileno(), place)
    os.environ.update(env)
    if random := sys.modules.get("numpy.random"):
        random.seed()  # as in a new process


def run_program(words: Sequence[str]) -> None:
    """Runs a Python file with arguments as `python` does."""
    sys.argv = list(words)
    program = Path(words[0]).absolute()
    if not sys.flags.safe_path:
        sys.path[0] = str(program.parent)
    module = sys.modules["__main__"] = ModuleType("__main__")
    module.__file__ = str(program)
    exec(compile(program.read_bytes(), program, "exec"), vars(module))


def main() -> int:
    """Runs the sweep; in the process that the sweep starts, runs a trial's program in a fork."""
    if sys.argv[1:2] == ["--serve"]:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what the imports print is no answer
        if words := serve(sys.argv[2:], sys.stdin, answers):
            run_program(words)
        return 0
    from trimtab_cli.sweep.command import main as sweep

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preload", metavar="MODULE", action="append", required=True)
    flags, rest = parser.parse_known_args()
    preloaded = Preloaded(flags.preload)
    try:
        return sweep(rest, start=preloaded.start)
    finally:
        preloaded.close()


if __name__ == "__main__":
    sys.exit(main())
