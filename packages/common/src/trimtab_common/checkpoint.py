"""Checkpoints that survive a kill at any moment.

    root/checkpoint-<step>/
        manifest.json        format, step, number of processes, tied names, size and SHA-256 of every other file
        weights.safetensors  the caller's weights, each storage once
        state.pt             optimizer, scheduler, controllers, moments, plain numbers (read with weights_only)
        rank-<index>.pt      what differs between processes, the state of every random generator included
        ...                  whatever `extra_files` writes, such as a model that other libraries load

A checkpoint is written to a hidden sibling, flushed to the disk, and then renamed: a folder named
checkpoint-<step> is complete. One run writes to one root, on a file system that all its processes share.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trimtab_common.seeding import load_rng_state, rng_state

if TYPE_CHECKING:
    from accelerate import Accelerator

FORMAT = 1
MANIFEST, WEIGHTS, STATE = "manifest.json", "weights.safetensors", "state.pt"
_COMPLETE = re.compile(r"checkpoint-(\d+)")
_UNSAFE = (
    pickle.PickleError,
    AttributeError,
    TypeError,
)  # pickle answers a lambda with either of the last two
_SET_ASIDE = re.compile(r"\.checkpoint-(\d+)\.replaced")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read: names the file, what was found, and how to mend it."""


@dataclass
class Checkpoint:
    """What `load_checkpoint` read; nothing is restored until the caller hands the parts to their owners."""

    path: Path
    step: int
    weights: dict[str, Tensor]  # on the CPU; names that were tied when saved share one tensor
    state: dict[str, Any]
    rank_state: dict[str, Any]
    _rng: dict[str, Any] = field(repr=False)

    def restore_rng(self) -> None:
        """Put every random generator of this process where it was when the checkpoint was saved."""
        load_rng_state(self._rng)


def save_checkpoint(
    root: str | Path,
    step: int,
    *,
    accelerator: Accelerator,
    weights: Mapping[str, Tensor],
    state: Mapping[str, Any],
    rank_state: Mapping[str, Any] | None = None,
    keep: int | None = None,
    extra_files: Callable[[Path], None] | None = None,
) -> Path:
    """Write root/checkpoint-<step> and return it; every process calls this together.

    weights: full tensors by name, of any layout, on any device; tied ones are stored once. Read from the main process.
    state: trees of tensors, numbers, strings, lists and dicts, as `state_dict` returns. Read from the main process.
    rank_state: the same, for what differs between processes (a rollout buffer, a shard). Random states are added.
    keep: how many complete checkpoints stay, this one included; None keeps all.
    extra_files: called on the main process with the unfinished folder, to add files of its own.

    Raises CheckpointError if `state` or `rank_state` holds what cannot be read back without running code from disk.
    """
    if step < 0:
        raise ValueError(f"step={step}: a checkpoint is named after the steps done so far, from 0.")
    if keep is not None and keep < 1:
        raise ValueError(f"keep={keep} would remove the checkpoint just written. Use 1 or more, or None to keep all.")
    root = Path(root)
    final, partial = root / f"checkpoint-{step}", root / f".checkpoint-{step}.partial"
    generators, tied = rng_state(), {}
    if accelerator.is_main_process:
        root.mkdir(parents=True, exist_ok=True)
        _clean(root)
        partial.mkdir()
    accelerator.wait_for_everyone()

    if not partial.is_dir():
        raise CheckpointError(
            f"{partial} was made by process 0 and is not seen by process {accelerator.process_index}. "
            "Save to a file system that all processes share."
        )
    rank_tree = {"rng": generators, "state": dict(rank_state or {})}
    _save_tree(partial / _rank_file(accelerator.process_index), rank_tree)
    if accelerator.is_main_process:
        tied = _save_weights(partial / WEIGHTS, weights)
        _save_tree(partial / STATE, dict(state))
        if extra_files is not None:
            extra_files(partial)
    accelerator.wait_for_everyone()

    if accelerator.is_main_process:
        manifest = {"format": FORMAT, "step": step, "processes": accelerator.num_processes, "tied": tied}
        _seal(partial, manifest)
        _publish(partial, final)
        if keep is not None:
            _rotate(root, final, keep)
    accelerator.wait_for_everyone()
    return final


def latest_checkpoint(root: str | Path) -> Path | None:
    """The checkpoint with the most steps under `root`, or None; unfinished folders do not count."""
    steps: dict[int, Path] = {}
    for folder in Path(root).glob("*checkpoint-*"):
        if (match := _COMPLETE.fullmatch(folder.name)) and folder.is_dir():
            steps[int(match[1])] = folder
        elif match := _SET_ASIDE.fullmatch(folder.name):  # killed between the two renames of `_publish`
            steps.setdefault(int(match[1]), folder)
    return steps[max(steps)] if steps else None


def load_checkpoint(path: str | Path, *, accelerator: Accelerator) -> Checkpoint:
    """Read and verify this process's part of a checkpoint; tensors come back on the CPU.

    Raises CheckpointError if a file is missing, truncated or changed, if the format is not ours, or if the
    checkpoint was written by another number of processes.
    """
    path = Path(path)
    manifest = _read_manifest(path)
    if manifest["processes"] != accelerator.num_processes:
        raise CheckpointError(
            f"{path / MANIFEST}: written by {manifest['processes']} process(es), this run has "
            f"{accelerator.num_processes}; random states and buffers cannot be divided anew. Resume with "
            f"--num_processes {manifest['processes']}, or start a new run from the weights in {path / WEIGHTS}."
        )
    mine = _rank_file(accelerator.process_index)
    for name, facts in manifest["files"].items():
        others = name.startswith("rank-") and name != mine
        _verify(path, name, facts["bytes"], None if others else facts["sha256"])
    rank_tree = _load_tree(path / mine)
    try:
        weights = load_file(path / WEIGHTS)
    except SafetensorError as error:
        raise CheckpointError(f"{path / WEIGHTS}: not readable as safetensors ({error}). {_instead(path)}") from error
    weights |= {name: weights[owner] for name, owner in manifest["tied"].items()}
    state = _load_tree(path / STATE)
    return Checkpoint(path, manifest["step"], weights, state, rank_tree["state"], rank_tree["rng"])


def _rank_file(index: int) -> str:
    return f"rank-{index:05d}.pt"


def _save_weights(file: Path, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Save each distinct tensor once; returns {name: name it is tied to}."""
    owners: dict[tuple[Any, ...], str] = {}
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


def _save_tree(file: Path, tree: dict[str, Any]) -> None:
    try:
        torch.save(tree, file)
        torch.load(file, map_location="cpu", weights_only=True, mmap=True)  # mapped: tensors are not read
    except _UNSAFE as error:
        where, kind = next(_unsafe(tree, ""), ("it", "an object"))
        raise CheckpointError(
            f"{file.name}: {where} is {kind}, which cannot be read back without running code from the file. "
            "Convert it to tensors, numbers, strings, lists or dicts before saving."
        ) from error


def _unsafe(tree: Any, where: str) -> Iterator[tuple[str, str]]:
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
        raise CheckpointError(
            f"{file}: not readable ({str(error).splitlines()[0]}). {_instead(file.parent)}"
        ) from error


def _seal(folder: Path, manifest: dict[str, Any]) -> None:
    """Add the manifest, written last, and flush every file and folder to the disk."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    missing = {_rank_file(index) for index in range(manifest["processes"])} - {file.name for file in files}
    if missing:
        raise CheckpointError(
            f"{folder}: {', '.join(sorted(missing))} did not arrive from the other processes. "
            "Save to a file system that all processes share."
        )
    manifest["files"] = {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in files
    }
    manifest["sha256"] = _sha256_of(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    folders = [folder, *(entry for entry in folder.rglob("*") if entry.is_dir())]
    for entry in [*files, folder / MANIFEST, *folders]:
        _fsync(entry)


def _publish(partial: Path, final: Path) -> None:
    """Give a sealed folder its name; one that had it is set aside until then."""
    aside = final.with_name(f".{final.name}.replaced")
    if final.exists():
        os.rename(final, aside)
    os.rename(partial, final)
    _fsync(final.parent)
    if aside.exists():
        _remove(aside)


def _rotate(root: Path, newest: Path, keep: int) -> None:
    """Remove the older checkpoints beyond `keep`; incomplete ones neither count nor go."""
    older = [
        (int(match[1]), folder)
        for folder in root.iterdir()
        if (match := _COMPLETE.fullmatch(folder.name)) and folder != newest and _is_complete(folder)
    ]
    older.sort()
    for _, folder in older[: max(0, len(older) - (keep - 1))]:
        _remove(folder)


def _is_complete(folder: Path) -> bool:
    try:
        for name, facts in _read_manifest(folder)["files"].items():
            _verify(folder, name, facts["bytes"], None)
    except CheckpointError:
        return False
    return True


def _remove(folder: Path) -> None:
    # Renamed first, so that a kill while files go one by one leaves no folder that looks complete.
    doomed = folder.with_name(f".{folder.name.lstrip('.')}.removed")
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def _clean(root: Path) -> None:
    """Finish what a killed run left: remove unfinished folders, put back one whose replacement never came."""
    for folder in root.glob(".checkpoint-*"):
        if folder.name.endswith((".partial", ".removed")):
            shutil.rmtree(folder)
        elif match := _SET_ASIDE.fullmatch(folder.name):
            final = root / f"checkpoint-{match[1]}"
            if final.exists():
                shutil.rmtree(folder)
            else:
                os.rename(folder, final)


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text())
    except OSError as error:
        raise CheckpointError(
            f"{file}: {error.strerror}. A checkpoint of trimtab has this file; give the folder named checkpoint-<step> "
            f"itself. {_instead(path)}"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{file}: not readable as JSON ({error}). {_instead(path)}") from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise CheckpointError(
            f"{file}: format {found!r}, this version of trimtab reads format {FORMAT}. "
            "Resume with the version that wrote it."
        )
    if manifest.pop("sha256", None) != _sha256_of(manifest):
        raise CheckpointError(f"{file}: changed since it was saved (SHA-256 differs). {_instead(path)}")
    return manifest


def _verify(folder: Path, name: str, size: int, digest: str | None) -> None:
    file = folder / name
    if not file.is_file():
        raise CheckpointError(f"{file}: missing, {size} bytes are needed. {_instead(folder)}")
    found = file.stat().st_size
    if found != size:
        raise CheckpointError(f"{file}: {found} bytes found, {size} were written. {_instead(folder)}")
    if digest is not None and _sha256(file) != digest:
        raise CheckpointError(f"{file}: changed since it was saved (SHA-256 differs). {_instead(folder)}")


def _instead(path: Path) -> str:
    others = [other for other in path.parent.glob("checkpoint-*") if other != path and (other / MANIFEST).is_file()]
    others.sort(key=lambda other: int(match[1]) if (match := _COMPLETE.fullmatch(other.name)) else -1)
    other = f"resume from {others[-1]}" if others else "start anew, as no other checkpoint lies beside it"
    return f"Restore it from a copy, or remove {path} and {other}."


def _sha256_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
