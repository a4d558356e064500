"""The state of a GRPO run in a checkpoint: one file per process, in addition to Trainer's files."""

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trimtab_common.health import HealthMonitor

from .batches import RolloutBuffer


@dataclass
class Progress:
    """The progress of a process in a run.

    Attributes:
        buffer: the rollout that is in use.
        health: the alerts so far.
        num_tokens: sampled and read, by all processes.
        pending: the next rollout, where rollouts are asynchronous: a `sampling.asynchronous.Pending`.
    """

    buffer: RolloutBuffer
    health: HealthMonitor = field(default_factory=HealthMonitor)
    num_tokens: int = 0
    pending: Any = None

    def save(self, folder: str, rank: int, processes: int) -> None:
        """Write the file of a process, one of so many."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        state = {"buffer": self.buffer.state_dict(), "health": self.health.state_dict(), "num_tokens": self.num_tokens}
        pending = {} if self.pending is None else self.pending.state_dict()
        torch.save(state | {"pending": pending, "processes": processes}, _file(folder, rank))

    def load(self, folder: str, rank: int, processes: int) -> None:
        """Restore what `save` wrote; if this process has no part of it, warn and begin with a new rollout."""
        file = _file(folder, rank)
        state: dict[str, Any] = torch.load(file, weights_only=True) if file.exists() else {}
        if state.get("processes") != processes or "rollout" not in state["buffer"]:
            problem = "does not exist"
            if state:
                is_older = state["processes"] == processes
                problem = "is of another release" if is_older else f"was saved by one of {state['processes']} processes"
            warnings.warn(
                f"{file} {problem}: training goes on with a new rollout, and not to the bit as it would have. Resume "
                f"with as many processes as before ({processes} now), from a checkpoint of save_only_model=False.",
                stacklevel=3,
            )
            return
        self.buffer.load_state_dict(state["buffer"])
        self.health.load_state_dict(state["health"])
        self.num_tokens = state["num_tokens"]
        if self.pending is not None:
            self.pending.load_state_dict(state["pending"])


def _file(folder: str, rank: int) -> Path:
    return Path(folder) / f"rollout_{rank}.pt"
