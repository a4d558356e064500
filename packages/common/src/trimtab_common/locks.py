"""One writer per folder of checkpoints or of a sweep: process 0 of a run locks a file in it.

The kernel frees the lock when the process ends, however it ends. Over NFS the server keeps it (NFS 4, or version 3 with
its lock service), so that it holds between machines; a client that crashes keeps it until the server gives it up. A
file system without locks gives a warning, and no protection.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
import warnings
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO

from trimtab_common.sealing import CheckpointError

LOCK = "_lock"  # uploads of a folder leave out names that begin with an underscore
PATIENCE = 5.0
"""Seconds to wait until the processes of a killed run have ended."""


def hold(root: Path, owner: object) -> None:
    """Locks an existing folder for an object of this process, until `free` or until the object is deleted.

    Several objects of a process may hold it.

    Raises:
        CheckpointError: another process holds it.
    """
    path = root.resolve()
    if path not in _held:
        if (file := _locked(path)) is None:
            return
        _held[path] = file, set()
    owners = _held[path][1]
    if id(owner) not in owners:
        owners.add(id(owner))
        weakref.finalize(owner, _free, path, id(owner))


def free(owner: object) -> None:
    """Releases the locks of an object."""
    for path in list(_held):
        _free(path, id(owner))


def _free(path: Path, owner: int) -> None:
    if path not in _held:
        return
    file, owners = _held[path]
    owners.discard(owner)
    if not owners:
        del _held[path]
        with suppress(OSError):  # the folder may be gone, or read-only by now
            (path / LOCK).unlink()
        file.close()


def _locked(root: Path) -> IO[str] | None:
    """Returns the locked file; None if the folder cannot be written to, which the save reports."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            file = (root / LOCK).open("a+")
        except OSError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_in_place(file, root / LOCK):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}")
                file.flush()
                return file
            file.close()  # the one that held it has removed it
        except OSError as error:
            file.seek(0)
            holder = file.read()
            file.close()
            if error.errno != errno.EWOULDBLOCK:
                warnings.warn(f"{root} cannot be locked ({error}): nothing keeps a second run out of it.", stacklevel=4)
                return None
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{root}: {holder or 'another process'} writes here, and two runs would mix their files. Wait "
                    "until it has ended, end it, or choose another folder."
                ) from error
            time.sleep(0.05)


def _is_in_place(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _forget() -> None:
    """Closes the files in a forked child, so that no lock outlives the process that took it."""
    for file, _ in _held.values():
        os.close(file.fileno())
    _held.clear()


_held: dict[Path, tuple[IO[str], set[int]]] = {}
os.register_at_fork(after_in_child=_forget)
