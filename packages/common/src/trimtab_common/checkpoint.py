"""Checkpoints that survive a kill at any moment.

    root/checkpoint-<step>/
        manifest.json        see `trimtab_common.sealing`; also number of processes, tied names, the run
        weights.safetensors  the caller's weights, each storage once
        shards/              instead: weights and moments that the processes share, each process's parts (FSDP)
        state.pt             optimizer, scheduler, controllers, moments, plain numbers (read with weights_only)
        rank-<index>.pt      what differs between processes, the state of every random generator included

One run writes to one root, on a file system that all its processes share.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from trimtab_common.checkpoint_shards import Owner, divided, join, read, refuse_code, split, write
from trimtab_common.run_record import RunRecord
from trimtab_common.sealing import (
    MANIFEST,
    CheckpointError,
    clean,
    instead,
    is_of_files,
    publish,
    read_manifest,
    rotate,
    save_error,
    unfinished,
    verify_files,
)
from trimtab_common.seeding import load_rng_state, rng_state
from trimtab_common.stats import everywhere

if TYPE_CHECKING:
    from accelerate import Accelerator

WEIGHTS, STATE, SHARDS = "weights.safetensors", "state.pt", "shards"
_UNSAFE = (pickle.PickleError, AttributeError, TypeError)  # pickle answers a lambda with either of the last two


@dataclass
class Checkpoint:
    """The contents of a checkpoint. The caller restores them.

    Args:
        path: its folder.
        step: the number of steps, as in the folder's name.
        weights: on the CPU; names that were tied when saved share one tensor.
        state: the state that all processes share.
        rank_state: the state of this process.
        run: the run that saved it; None if the checkpoint does not name one.
    """

    path: Path
    step: int
    weights: dict[str, Tensor]
    state: dict[str, Any]
    rank_state: dict[str, Any]
    run: RunRecord | None
    _tied: dict[str, str] = field(repr=False)
    _rng: dict[str, Any] | None = field(repr=False)

    def divide(self, owner: Owner) -> None:
        """Reads `shards/`, and divides weights and state over the processes. Collective.

        Args:
            owner: from ("weights", name) or ("state", ...keys) to the parameter as whose parts a tensor is divided.
        """
        tree: dict[str, Any] = {"weights": self.weights, "state": self.state}
        if (self.path / SHARDS).is_dir():
            join(tree, read(self.path / SHARDS, owner))
        tree = divided(tree, owner)
        self.weights, self.state = tree["weights"], tree["state"]
        self.weights |= {name: self.weights[first] for name, first in self._tied.items()}

    def restore_rng(self) -> None:
        """Restores every random generator of this process to its state when the checkpoint was saved.

        After a change of the number of processes there is no such state, and the generators stay as they are.
        """
        if self._rng is not None:
            load_rng_state(self._rng)


def save_checkpoint(
    root: str | Path,
    step: int,
    *,
    accelerator: Accelerator,
    weights: Mapping[str, Tensor],
    state: Mapping[str, object],
    rank_state: Mapping[str, object] | None = None,
    run: RunRecord | None = None,
    keep: int | None = None,
) -> Path:
    """Writes root/checkpoint-<step> and returns it. Collective.

    Args:
        root: the folder of the run's checkpoints.
        step: steps done.
        weights: tensors by name, on any device; tied tensors are stored once. The main process writes them; each
            process writes its part of a tensor that is divided over the processes.
        state: trees of tensors, numbers, strings, lists and dicts, as `state_dict` returns; written in the same way.
        rank_state: the same kind of tree, for state that differs between processes, such as a rollout buffer. Each
            process writes its own, and adds its random states.
        run: the run that saves, and its settings; its folder holds no other run's checkpoints.
        keep: how many complete checkpoints stay, this one included; None keeps all.

    Raises:
        CheckpointError: the file system refuses a file; `state` or `rank_state` holds what cannot be read back without
            running code from disk; or `root` holds checkpoints of another run. In all processes.
        ValueError: `step` or `keep` is out of range.
    """
    if step < 0:
        raise ValueError(f"step={step}: a checkpoint is named after the steps done so far, from 0.")
    if keep is not None and keep < 1:
        raise ValueError(f"keep={keep} would remove the checkpoint just written. Use 1 or more, or None to keep all.")
    root = Path(root)
    if run is not None:
        run.check_folder(root)
    final = root / f"checkpoint-{step}"
    partial = unfinished(final)
    rank_tree = {"rng": rng_state(), "state": dict(rank_state or {})}
    tied = _tied_parts(weights)
    distinct = {name: weight for name, weight in weights.items() if name not in tied}
    tree, shards = split({"weights": distinct, "state": state})

    def open_folder() -> None:
        if accelerator.is_main_process:
            root.resolve().mkdir(parents=True, exist_ok=True)  # the target of a link
            clean(root)
            partial.mkdir()

    def write_parts() -> None:
        if not partial.is_dir():
            raise CheckpointError(
                f"{partial} was made by process 0 and is not seen by process {accelerator.process_index}. "
                "Save to a file system that all processes share."
            )
        _save_tree(partial / _rank_file(accelerator.process_index), rank_tree)
        if accelerator.is_main_process:
            tied.update(_save_weights(partial / WEIGHTS, tree["weights"]))
            _save_tree(partial / STATE, tree["state"])

    def complete() -> None:
        if accelerator.is_main_process:
            facts = {"step": step, "processes": accelerator.num_processes, "tied": tied}
            if run is not None:
                facts["run"] = run.as_dict()
            publish(partial, final, facts, required=[_rank_file(i) for i in range(accelerator.num_processes)])
            if keep is not None:
                rotate(root, final, keep)

    with _explained(final, tree, *[rank_tree] * accelerator.num_processes, dict(shards)):
        everywhere(open_folder)
        everywhere(write_parts)
        if shards:
            write(partial / SHARDS, shards)
        everywhere(complete)
    return final


@contextmanager
def _explained(folder: Path, *trees: object) -> Iterator[None]:
    """Turns an error of the file system inside the block into a SaveError; see `save_error`."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        if not (is_of_files(error) or isinstance(error, CheckpointException)):
            raise
        raise save_error(folder, error, needed=sum(map(bytes_of, trees))) from error


def bytes_of(tree: object) -> int:
    """Bytes of the tensors in a tree of dicts and lists."""
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    inner = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else ()
    return sum(map(bytes_of, inner))


def _tied_parts(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns {name: name that it is tied to} for tensors that are divided over processes."""
    first: dict[int, str] = {}
    names = {
        name: first.setdefault(id(weight), name) for name, weight in weights.items() if isinstance(weight, DTensor)
    }
    return {name: other for name, other in names.items() if name != other}


def load_checkpoint(path: str | Path, *, accelerator: Accelerator, accepts_changes: bool = False) -> Checkpoint:
    """Reads and verifies this process's part of a checkpoint; tensors come back on the CPU.

    `Checkpoint.divide` reads `shards/`; here, the processes share the work of verifying these files.

    Args:
        path: a folder named checkpoint-<step>.
        accepts_changes: whether another number of processes may have written it. Random states are then not
            restored, and the checkpoint must hold no other state per process.

    Raises:
        CheckpointError: a file is missing, truncated or changed, the format is another one, or another number of
            processes wrote the checkpoint.
    """
    path = Path(path)
    manifest = read_manifest(path)
    if "resumable" in manifest:
        raise CheckpointError(
            f"{path} is a checkpoint of a trainer on transformers.Trainer, which this trainer cannot resume. To start "
            "from its weights, give the folder as the model."
        )
    if missing := {"processes", "tied"} - manifest.keys():
        raise CheckpointError(
            f"{path / MANIFEST} does not say {' and '.join(sorted(missing))}: the folder was sealed by "
            "`python -m trimtab_common.sealing` after its own manifest was lost, and this trainer cannot resume it. "
            f"Start a new run from its weights ({WEIGHTS}), or resume an earlier checkpoint."
        )
    is_same_world = manifest["processes"] == accelerator.num_processes
    mine = _rank_file(accelerator.process_index if is_same_world else 0)
    shards = sorted(name for name in manifest["files"] if name.startswith(f"{SHARDS}/"))
    others = {name for name in manifest["files"] if name.startswith("rank-")} - {mine}
    others |= set(shards) - set(shards[accelerator.process_index :: accelerator.num_processes])
    verify_files(path, manifest, unread=others)
    refuse_code(path)
    rank_tree = _load_tree(path / mine)
    has_buffers = any(part not in (None, {}) for part in rank_tree["state"].values())
    if not is_same_world and (has_buffers or not accepts_changes):
        raise CheckpointError(
            f"{path / MANIFEST}: written by {manifest['processes']} process(es), this run has "
            f"{accelerator.num_processes}; random states and buffers cannot be divided anew. Resume with "
            f"--num_processes {manifest['processes']}, or "
            + (
                f"start a new run from the weights in {path / WEIGHTS}."
                if has_buffers
                else "set resume_with_changes=True to go on with other random numbers."
            )
        )
    try:
        weights = load_file(path / WEIGHTS)
    except SafetensorError as error:
        raise CheckpointError(f"{path / WEIGHTS}: not readable as safetensors ({error}). {instead(path)}") from error
    tied = manifest["tied"]
    weights |= {name: weights[first] for name, first in tied.items() if first in weights}
    state = _load_tree(path / STATE)
    run = RunRecord(**manifest["run"]) if "run" in manifest else None
    rng = rank_tree["rng"] if is_same_world else None
    return Checkpoint(path, manifest["step"], weights, state, rank_tree["state"], run, tied, rng)


def _rank_file(index: int) -> str:
    return f"rank-{index:05d}.pt"


def _save_weights(file: Path, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Saves each distinct tensor once; returns {name: name that it is tied to}."""
    owners: dict[tuple[object, ...], str] = {}
    storages: set[tuple[torch.device, int]] = set()
    tied: dict[str, str] = {}
    stored: dict[str, Tensor] = {}
    for name, weight in weights.items():
        tensor = weight.detach()
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        view = (*storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and view in owners:
            tied[name] = owners[view]
            continue
        owners[view] = name
        # safetensors takes neither strides nor two tensors on one storage: a transpose, a second part get a copy.
        if storage in storages or not tensor.is_contiguous():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        storages.add(storage)
        stored[name] = tensor
    save_file(stored, file, metadata={"format": "pt"})
    return tied


def _save_tree(file: Path, tree: Mapping[str, object]) -> None:
    try:
        torch.save(tree, file)
        torch.load(file, map_location="cpu", weights_only=True, mmap=True)  # mapped: tensors are not read
    except _UNSAFE as error:
        where, kind = next(_unsafe(tree, ""), ("it", "an object"))
        raise CheckpointError(
            f"{file.name}: {where} is {kind}, which cannot be read back without running code from the file. "
            "Convert it to tensors, numbers, strings, lists or dicts before saving."
        ) from error


def _unsafe(tree: object, where: str) -> Iterator[tuple[str, str]]:
    """The leaves of a tree that `weights_only` refuses, each with its path and type."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _unsafe(value, f"{where}[{key!r}]")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from _unsafe(value, f"{where}[{index}]")
    elif not isinstance(tree, Tensor):
        buffer = io.BytesIO()
        try:
            torch.save(tree, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except _UNSAFE:
            yield where, f"{type(tree).__module__}.{type(tree).__qualname__}"


def _load_tree(file: Path) -> dict[str, Any]:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{file}: not readable ({str(error).splitlines()[0]}). {instead(file.parent)}") from error
