"""Processes that train together, as torchrun starts them, gloo between them and one thread each."""

import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

ROOT = Path(__file__).resolve().parents[1]
TWO_PROCESSES = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore::UserWarning")]
"""Marks of tests that train in two processes for minutes."""


def results_of_two(module: str, folder: Path, *, seconds: int = 280) -> list[dict[str, Any]]:
    """Run `python -m module folder` in two processes; what each saved as folder/<rank>.pt."""
    launch(module, str(folder), processes=2, seconds=seconds)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


def environment() -> dict[str, str]:
    """The environment of a process that imports what this one does, with one thread."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def launch(module: str, *args: str, processes: int, seconds: int = 280) -> None:
    """Run `python -m module *args` in processes that know each other; they are killed after so many seconds."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run(
        [*torchrun, "-m", module, *args], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stderr[-6000:]


@contextmanager
def process_of_many(engine: Callable[[], None] | None = None) -> Iterator[tuple[int, int]]:
    """Yields the rank of a process that `launch` started, and how many there are; ends their group after the block.

    A trainer must be gone by then: DDP holds on to the group.

    Args:
        engine: prepares accelerate for an engine, such as `let_accelerate_shard_on_cpu`.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if engine is not None:
        engine()
    yield int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if torch.distributed.is_initialized():  # one process needs no group, unless FSDP2 starts one
        torch.distributed.destroy_process_group()


def let_accelerate_shard_on_cpu() -> None:
    """Make accelerate take an FSDP plugin on a CPU, which it ignores there, for the rest of this process.

    FSDP2 itself works over gloo. The process may create several accelerators, each with a plugin of its own.
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
        status: of exit; -9 after SIGKILL.
        output: what it printed.
        errors: what it wrote to stderr.
        time: of the end, in seconds of `time.monotonic`.
    """

    status: int
    output: str
    errors: str
    time: float


def ends_of_two(module: str, *args: str, seconds: int = 100) -> list[Ended]:
    """Run `python -m module *args` in two processes that know each other, each of which ends by itself.

    There is no torchrun, which would kill one as soon as the other has failed.
    """
    with socket.create_server(("localhost", 0)) as unused:
        port = unused.getsockname()[1]
    group = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
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
