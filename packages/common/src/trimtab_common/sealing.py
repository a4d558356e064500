"""Folders of checkpoints in which a checkpoint is complete or does not count.

    root/checkpoint-<step>/
        manifest.json   written last: format, step, run, and size and SHA-256 of every other file
        ...             the files of the checkpoint

A checkpoint with a manifest is sealed. It is written under another name (`unfinished`), sealed, and then renamed, so
that a folder named checkpoint-<step> is complete. `latest_checkpoint` returns sealed checkpoints only, and `verify`
proves that a sealed checkpoint is the one that was written. A checkpoint may be a link to a folder.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from safetensors import SafetensorError

FORMAT = 1
MANIFEST = "manifest.json"

published: list[Path] = []
"""The checkpoints that this process has written."""

_COMPLETE = re.compile(r"checkpoint-(\d+)")
_HIDDEN = "[._]checkpoint-*"
"""Checkpoints being written, replaced or removed. transformers.Trainer does not upload names that begin with _."""
_SET_ASIDE = re.compile(r"[._]checkpoint-(\d+)\.replaced")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or used: names the file, what is wrong with it, and the remedy."""


class SaveError(CheckpointError):
    """The file system refused to store a checkpoint. The unfinished part is removed."""


OnSaveError: TypeAlias = Literal["raise", "warn"]
ON_SAVE_ERROR = (
    "What `train` does when a checkpoint cannot be written, because the disk is full, read-only or gone: 'raise' ends "
    "the run, 'warn' trains on without the checkpoint."
)
"""The help text of the configs' setting `on_save_error`."""


_WRITERS = ("PytorchStream", "iostream", "container")
"""Words in the RuntimeErrors that torch.save raises when it cannot write."""


def is_of_files(error: BaseException) -> bool:
    """Whether an error comes from the file system, such as a full disk. torch.save raises a RuntimeError then."""
    is_archive = isinstance(error, RuntimeError) and any(word in str(error) for word in _WRITERS)
    return isinstance(error, OSError | SafetensorError) or is_archive


def save_error(folder: Path, error: BaseException, *, needed: int) -> SaveError:
    """Removes the unfinished checkpoint, and returns the error for a save that the file system refused.

    Args:
        folder: the final name of the checkpoint.
        error: the error of the file system, or of the library that wrote.
        needed: the approximate size of the checkpoint in bytes.
    """
    root = folder.parent
    with suppress(OSError):  # a folder that cannot be written to cannot be cleaned either
        clean(root)
    place = next(parent for parent in folder.resolve().parents if parent.is_dir())
    newest, free = latest_checkpoint(root), free_bytes(place)
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    room = "an unknown number of" if free is None else free
    whole = f"The last complete checkpoint is {newest}" if newest else "No checkpoint is complete"
    return SaveError(
        f"{folder} is not saved: {reason}. It needs about {needed} bytes; at {place} {room} bytes are free. {whole}. "
        "Make room, or give back the folder and the right to write to it; then resume."
    )


def save_or_warn(save: Callable[[], object], on_save_error: OnSaveError) -> None:
    """Saves a checkpoint between two steps.

    Args:
        save: raises a SaveError where the file system refuses, in every process.
        on_save_error: "warn" makes a warning of the SaveError.
    """
    try:
        save()
    except SaveError as error:
        warn_unsaved(error, on_save_error)


def warn_unsaved(error: SaveError, on_save_error: OnSaveError) -> None:
    """Warns that training goes on without a checkpoint; raises the error unless `on_save_error` is "warn"."""
    if on_save_error != "warn":
        raise error
    warnings.warn(f"{error} Training goes on, because on_save_error='warn'.", stacklevel=3)


def checkpoints(root: str | Path) -> dict[int, Path]:
    """The folders named checkpoint-<step> under `root`, and links, by their step in ascending order, sealed or not."""
    named = [(_COMPLETE.fullmatch(folder.name), folder) for folder in Path(root).glob("checkpoint-*")]
    steps = {int(match[1]): folder for match, folder in named if match and (folder.is_dir() or folder.is_symlink())}
    return dict(sorted(steps.items()))


def latest_checkpoint(root: str | Path) -> Path | None:
    """Returns the sealed checkpoint with the most steps under `root`, or None.

    A folder without a manifest, or with a missing or truncated file, does not count; a warning names it. Contents are
    not read: `verify` does that.
    """
    candidates = checkpoints(root)
    for folder in Path(root).glob(f"{_HIDDEN}.replaced"):
        if match := _SET_ASIDE.fullmatch(folder.name):  # killed between the two renames of `publish`
            step = int(match[1])
            if step not in candidates or not is_complete(candidates[step]):
                candidates[step] = folder
    for step in sorted(candidates, reverse=True):
        damage = _damage(candidates[step])
        if damage is None:
            return candidates[step]
        warnings.warn(f"Passing over {candidates[step]}: {damage}", stacklevel=2)
    return None


def find_checkpoint(where: str | Path) -> Path | None:
    """Returns the checkpoint that a path names: the folder itself, or the newest one in a folder of checkpoints."""
    folder = Path(where)
    if (folder / MANIFEST).is_file() or _COMPLETE.fullmatch(folder.name):
        return folder  # `verify` says what it lacks
    return latest_checkpoint(folder) or latest_checkpoint(folder / "checkpoints")


def no_checkpoint(where: str | Path, newest: str) -> CheckpointError:
    """The error where `find_checkpoint` finds none.

    Args:
        newest: what to write for the newest checkpoint of the run's own folder.
    """
    state = "is not a checkpoint, and holds none" if Path(where).is_dir() else "does not exist"
    return CheckpointError(
        f"There is no checkpoint to resume from: {where} {state}. Give a folder checkpoint-<step>, the folder that "
        f"holds such folders, or {newest}."
    )


def seal(folder: Path, facts: Mapping[str, object], *, required: Collection[str] = ()) -> None:
    """Adds the manifest, written last, and flushes every file and folder to the disk.

    Args:
        folder: the checkpoint, with all its files.
        facts: `step`, and whatever else the manifest is to say; values that JSON can hold.
        required: names of files that must be there.

    Raises:
        CheckpointError: a required file is missing.
    """
    partial = folder / f".{MANIFEST}.tmp"
    partial.unlink(missing_ok=True)  # of a process that was killed
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != MANIFEST)
    if missing := set(required) - {file.name for file in files}:
        raise CheckpointError(
            f"{folder}: {', '.join(sorted(missing))} did not arrive from the other processes. "
            "Save to a file system that all processes share."
        )
    manifest: dict[str, Any] = {"format": FORMAT, **facts}
    manifest["files"] = {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in files
    }
    manifest["sha256"] = _sha256_of(manifest)
    partial.write_text(json.dumps(manifest, indent=1))
    folders = [folder, *(entry for entry in folder.rglob("*") if entry.is_dir())]
    for entry in [*files, partial, *folders]:
        _fsync(entry)
    os.rename(partial, folder / MANIFEST)
    _fsync(folder)


def unfinished(final: Path) -> Path:
    """Where a checkpoint is written until `publish` gives it its name."""
    return final.with_name(f"_{final.name}.partial")


def verify(path: str | Path) -> dict[str, Any]:
    """Proves that a checkpoint, a folder named checkpoint-<step>, holds what was sealed, and returns its manifest.

    Raises:
        CheckpointError: the manifest is missing or of another format, or a file is missing, truncated or changed.
    """
    manifest = read_manifest(Path(path))
    verify_files(Path(path), manifest)
    return manifest


def verify_files(path: Path, manifest: Mapping[str, Any], *, unread: Collection[str] = ()) -> None:
    """Proves that a checkpoint's files match its manifest; of the `unread` ones their sizes alone. See `verify`."""
    for name, facts in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file}: missing, {facts['bytes']} bytes are needed. {instead(path)}")
        if (present := file.stat().st_size) != facts["bytes"]:
            raise CheckpointError(f"{file}: has {present} bytes, {facts['bytes']} were written. {instead(path)}")
        if name not in unread and sha256(file) != facts["sha256"]:
            raise CheckpointError(f"{file}: changed since it was saved (SHA-256 differs). {instead(path)}")


def is_complete(folder: str | Path) -> bool:
    """Whether a folder is sealed and every file has the size that the manifest records."""
    return _damage(Path(folder)) is None


def _damage(folder: Path) -> str | None:
    try:
        manifest = read_manifest(folder)
        verify_files(folder, manifest, unread=manifest["files"])
    except CheckpointError as error:
        return str(error)
    return None


def publish(partial: Path, final: Path, facts: Mapping[str, object], *, required: Collection[str] = ()) -> None:
    """Seals a folder and gives it its final name. Replaces a checkpoint with this name; renames any other folder.

    Args:
        partial: the folder; see `unfinished`.
    """
    seal(partial, facts, required=required)
    aside = final.with_name(f"_{final.name}.replaced")
    if (final / MANIFEST).exists():
        os.rename(final, aside)
    elif os.path.lexists(final):
        keep_under_other_name(final)
    os.rename(partial, final)
    if error := _fsync(final.parent):
        warn_once(
            f"The file system of {final.parent} does not flush folders ({error.strerror}): a loss of power may "
            "cost the newest checkpoint."
        )
    if os.path.lexists(aside):
        remove(aside)
    published.append(final)


def keep_under_other_name(folder: Path) -> Path:
    """Renames checkpoint-<step> to _replaced-<number>-checkpoint-<step>, the first free one, and returns that."""
    names = (folder.with_name(f"_replaced-{number}-{folder.name}") for number in itertools.count(1))
    return folder.rename(next(name for name in names if not os.path.lexists(name)))


def rotate(root: Path, newest: Path, keep: int, protected: Collection[Path] = ()) -> None:
    """Removes the oldest complete checkpoints until `keep` are left; `newest` and protected ones count and stay.

    Incomplete checkpoints neither count nor are removed.
    """
    staying = {folder.resolve() for folder in (newest, *protected)}
    complete = [folder for folder in checkpoints(root).values() if is_complete(folder)]
    removable = [folder for folder in complete if folder.resolve() not in staying]
    for folder in removable[: max(0, len(complete) - keep)]:
        remove(folder)


def remove(folder: Path) -> None:
    """Removes a checkpoint; a kill meanwhile leaves no folder that looks complete."""
    doomed = folder.with_name(f"_{folder.name.lstrip('_.')}.removed")
    os.rename(folder, doomed)
    _delete(doomed)


def clean(root: Path) -> None:
    """Cleans up after a killed run: removes unfinished folders, and restores a checkpoint that was being replaced."""
    for folder in root.glob(_HIDDEN):
        if folder.name.endswith((".partial", ".removed")):
            _delete(folder)
        elif match := _SET_ASIDE.fullmatch(folder.name):
            final = root / f"checkpoint-{match[1]}"
            if os.path.lexists(final):
                _delete(folder)
            else:
                os.rename(folder, final)


def _delete(folder: Path) -> None:
    """Deletes a folder, or a link, whose target stays."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; CheckpointError if it is missing, changed or of another format."""
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text())
    except OSError as error:
        if not path.is_dir():
            raise CheckpointError(f"{path} does not exist. {instead(path)}") from error
        if not _COMPLETE.fullmatch(path.name):
            raise CheckpointError(
                f"{file}: {error.strerror}. This is not a checkpoint of trimtab: give the folder named "
                "checkpoint-<step> itself."
            ) from error
        raise CheckpointError(
            f"{file}: {error.strerror}. Either the save was cut short, or another program wrote this checkpoint. "
            f"{instead(path)} If you know that it is whole, seal it: python -m trimtab_common.sealing {path}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not readable as JSON ({error}). {instead(path)}") from error
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if version != FORMAT:
        raise CheckpointError(
            f"{file}: format {version!r}, this version of trimtab reads format {FORMAT}. "
            "Resume with the version that wrote it."
        )
    if manifest.pop("sha256", None) != _sha256_of(manifest):
        raise CheckpointError(f"{file}: changed since it was saved (SHA-256 differs). {instead(path)}")
    return manifest


def instead(path: Path) -> str:
    """The remedy for a damaged or missing checkpoint: the sealed one with the most steps in the same folder."""
    others = [
        folder for folder in checkpoints(path.parent).values() if folder != path and (folder / MANIFEST).is_file()
    ]
    other = f"resume from {others[-1]}" if others else "start anew, because there is no other checkpoint in this folder"
    return f"Restore it from a copy, or remove {path} and {other}." if path.is_dir() else f"Check the path, or {other}."


def sha256(file: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sha256_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _fsync(path: Path) -> OSError | None:
    """Flushes a file or folder to the disk; returns the error if the file system does not support this."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not (path.is_dir() or error.errno in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)):
            raise
        return error
    return None


def free_bytes(folder: Path) -> int | None:
    """Returns the free bytes on the folder's disk; None if the file system does not report them."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free if usage.total else None


@cache
def warn_once(text: str) -> None:
    """Warns, at the first call with this text."""
    warnings.warn(text, stacklevel=3)


def main(paths: Sequence[str]) -> None:
    """Seals folders that the user trusts: downloaded checkpoints, or checkpoints of other software."""
    for path in map(Path, paths):
        if not (match := _COMPLETE.fullmatch(path.name)):
            raise CheckpointError(f"{path}: a checkpoint's folder is named checkpoint-<step>. Rename it first.")
        seal(path, _facts(path) | {"step": int(match[1])})
        print(f"sealed {path}")


def _facts(path: Path) -> dict[str, object]:
    """What the manifest of a folder that is sealed anew says beside its files; nothing without a manifest."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: value for name, value in manifest.items() if name not in ("format", "files", "sha256")}


if __name__ == "__main__":
    main(sys.argv[1:])
