"""Processes that train together, as torchrun starts them, gloo between them and one thread each."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

ROOT = Path(__file__).resolve().parents[1]


def results_of_two(module: str, folder: Path, *, seconds: int = 170) -> list[dict[str, Any]]:
    """Run `python -m module folder` in two processes; what each saved as folder/<rank>.pt."""
    launch(module, str(folder), processes=2, seconds=seconds)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


def launch(module: str, *args: str, processes: int, seconds: int = 170) -> None:
    """Run `python -m module *args` in processes that know each other; they are killed after so many seconds."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run(
        [*torchrun, "-m", module, *args], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds
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
