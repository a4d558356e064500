"""The rollout that is in use, in a checkpoint: a file per process beside those of transformers' Trainer."""

import warnings
from pathlib import Path
from typing import Any

import torch


def save_state(folder: str, rank: int, state: dict[str, object]) -> None:
    """Write tensors, numbers, strings, and lists and dicts of them."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.save(state, _file(folder, rank))


def load_state(folder: str, rank: int) -> dict[str, Any] | None:
    """What `save_state` wrote; None, with a warning, where it wrote nothing for this process."""
    file = _file(folder, rank)
    if not file.exists():
        warnings.warn(
            f"There is no {file.name} in {folder}: training goes on with a new rollout, and not to the bit as it would "
            "have. Resume with as many processes as before, from a checkpoint of save_only_model=False.",
            stacklevel=3,
        )
        return None
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


def _file(folder: str, rank: int) -> Path:
    return Path(folder) / f"rollout_{rank}.pt"
