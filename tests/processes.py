"""Starts processes that train together, as torchrun does, connected by gloo and with one thread each."""

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.nn.parallel import DistributedDataParallel

from trimtab_cli.main import end_process_group

ROOT = Path(__file__).resolve().parents[1]
TWO_PROCESSES = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]
"""Marks of tests that train in two processes for minutes."""


def results_of_two(module: str, folder: Path) -> list[dict[str, Any]]:
    """Runs `python -m module folder` in two processes; returns what each saved as folder/<rank>.pt."""
    launch(module, str(folder), processes=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


def environment() -> dict[str, str]:
    """Returns the environment for a process with the same imports as this one, one thread, and a trace of a crash."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def connection_of(processes: int) -> dict[str, str]:
    """Returns the variables by which so many processes of this machine find each other."""
    with socket.create_server(("localhost", 0)) as unused:
        port = unused.getsockname()[1]
    size = str(processes)
    return {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}


@cache
def server_of(rank: int, session: int) -> subprocess.Popen[bytes]:
    """Starts the process that the processes of a rank are forked from: ranks and sessions differ in how they hash."""
    command = [sys.executable, "-m", "tests.run_forks"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=environment(), bufsize=0, **pipes)


SESSIONS = count()


def launch(module: str, *args: str, processes: int) -> None:
    """Runs `python -m module *args` in connected processes, which share the imports of `tests.run_forks`.

    The first process that fails ends the others, as under torchrun. Two launches in a row hash texts differently.
    """
    group, session = connection_of(processes), next(SESSIONS) % 2
    servers, statuses = [server_of(rank, session) for rank in range(processes)], dict[int, int]()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"log-{rank}.txt") for rank in range(processes)]
        try:
            for rank, (server, log) in enumerate(zip(servers, logs, strict=True)):
                place = environment() | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                job = {"module": module, "args": args, "environment": place, "log": str(log)}
                server.stdin.write(json.dumps(job).encode() + b"\n")
            left = {server.stdout: (rank, int(server.stdout.readline())) for rank, server in enumerate(servers)}
            while left and not any(statuses.values()):
                for answers in select.select([*left], [], [])[0]:
                    rank, _ = left.pop(answers)
                    statuses[rank] = int(answers.readline())
            for answers, (_, pid) in left.items():
                with suppress(ProcessLookupError):  # it has ended by itself
                    os.kill(pid, signal.SIGKILL)
                answers.readline()
        except BaseException:  # the answers of these servers cannot be trusted any more
            for server in servers:
                server.kill()
            server_of.cache_clear()
            raise
        failed = next((rank for rank, status in statuses.items() if status), None)
        assert failed is None, f"process {failed}, status {statuses[failed]}: {explained(logs[failed].read_text())}"


def launch_by_torchrun(module: str, *args: str, processes: int) -> None:
    """Runs `python -m module *args` as `launch` does, each in an interpreter of its own, for engines that want one."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run([*torchrun, "-m", module, *args], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, explained(done.stderr)


def explained(errors: str) -> str:
    """Returns the part of a failed process's output that names the cause."""
    crash = errors.find("Fatal Python error")  # the other process's complaint and torchrun's follow it
    return errors[crash:][:6000] if crash >= 0 else errors[-6000:]


@contextmanager
def process_of_many(engine: Callable[[], None] | None = None) -> Iterator[tuple[int, int]]:
    """Yields the rank of a process started by `launch` and the number of processes; ends the group after the block.

    The block must not keep a trainer: DDP holds on to the group, and gloo's threads, which live as long as the group,
    sometimes abort a process that exits.

    Args:
        engine: prepares accelerate for an engine, such as `let_accelerate_shard_on_cpu`.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if engine is not None:
        engine()
    yield int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    end_process_group()  # a single process has a group only if FSDP2 started one
    gc.collect()  # what ended the group itself may have left its trainer in a cycle
    kept = sum(type(thing) is DistributedDataParallel for thing in gc.get_objects())
    assert not kept, f"The block has kept {kept} of its trainers."


def threads_of_gloo() -> list[str]:
    """Returns the names of this process's threads that are gloo's."""
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def let_accelerate_shard_on_cpu() -> None:
    """Makes accelerate accept an FSDP plugin on a CPU, where it usually ignores it, for the rest of this process.

    FSDP2 itself works over gloo. The process may create several accelerators, each with its own plugin.
    """
    PartialState(cpu=True)
    construct = AcceleratorState.__init__

    def with_plugin(self: Any, *args: Any, fsdp_plugin: Any = None, _from_accelerator: bool = False, **kw: Any) -> None:
        if fsdp_plugin is not None:
            AcceleratorState._reset_state()
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU
        construct(self, *args, _from_accelerator=_from_accelerator, **kw)
        if fsdp_plugin is not None:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            if self.mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self.mixed_precision)

    AcceleratorState.__init__ = with_plugin


class Ended(NamedTuple):
    """How a process ended.

    Attributes:
        status: exit status; -9 after SIGKILL.
        output: text on stdout.
        errors: text on stderr.
        time: time of the end, in seconds of `time.monotonic`.
    """

    status: int
    output: str
    errors: str
    time: float


def ends_of_two(module: str, *args: str, seconds: int = 100) -> list[Ended]:
    """Runs `python -m module *args` in two connected processes; each must end by itself.

    No torchrun is involved, because it kills one process as soon as the other fails.
    """
    group = connection_of(2)
    started = [
        subprocess.Popen(
            [sys.executable, "-m", module, *args],
            cwd=ROOT,
            env=environment() | group | {"RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]

    def end_of(process: subprocess.Popen[str]) -> Ended:
        try:
            output, errors = process.communicate(timeout=seconds)
        finally:
            process.kill()
        return Ended(process.returncode, output, errors, time.monotonic())

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(end_of, started))
