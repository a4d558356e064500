"""What happens in a checkpoint folder: a run that goes back, links, file systems that lack a feature."""

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from tests.marks import slow_but
from tools.chaos import works
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers.trainer_utils import get_last_checkpoint

from trimtab_common import checkpoint as saved_by_us
from trimtab_common import run as runs_of_ours
from trimtab_common.checkpoint import load_checkpoint, save_checkpoint
from trimtab_common.sealing import SaveError, checkpoints, free_bytes, is_complete, latest_checkpoint, warn_once
from trimtab_lm.hf import checkpoints as runs_of_transformers

LONG = ("ppo", "ddpo", "ddpo_step", "dpo", "reward", "grpo", "iterative_sft")
ONE = slow_but(["sft", "ppo_step", *LONG], "sft")
EVERY = slow_but(["ppo_step", "sft", *LONG], "ppo_step", "sft")


@pytest.fixture(autouse=True)
def nothing_was_warned_of() -> None:
    warn_once.cache_clear()


class Killed(Exception):
    """Ends a run after an update."""


def run_that_keeps_all(name: str, folder: Path) -> list[Path]:
    """Returns the checkpoints of an eight-step run that keeps all of them."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (saved_by_us, runs_of_transformers):
            patch.setattr(module, "rotate", lambda *_, **__: None)
        works.WORKS[name](folder, "none")
    return list(checkpoints(folder / "checkpoints").values())


@pytest.mark.parametrize("name", EVERY)
def test_a_run_that_went_back_and_is_killed_goes_on_from_where_it_was(name: str, tmp_path: Path, monkeypatch):
    root, work = tmp_path / "checkpoints", works.WORKS[name]
    first, *later = run_that_keeps_all(name, tmp_path)

    def kill(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        for module in (works, runs_of_ours, runs_of_transformers):
            patch.setattr(module, "latest_checkpoint", lambda root: first)
        handle = register_optimizer_step_post_hook(kill)
        with pytest.warns(UserWarning, match=f"{later[0].name} to _replaced-1-{later[0].name}"), pytest.raises(Killed):
            work(tmp_path, "none")
        handle.remove()
    assert latest_checkpoint(root) == first
    assert get_last_checkpoint(str(root)) == str(first)
    work(tmp_path, "none")  # keeps two checkpoints
    left = {folder.name for folder in root.iterdir() if folder.is_dir()}
    assert left == {folder.name for folder in later[-2:]} | {f"_replaced-1-{folder.name}" for folder in later}
    assert all(is_complete(folder) for folder in root.iterdir() if folder.is_dir())


def save(root: Path, step: int, **options: Any) -> Path:
    weights = {"w": torch.full((300,), float(step))}
    return save_checkpoint(root, step, accelerator=Accelerator(cpu=True), weights=weights, state={}, **options)


def moved_and_linked(checkpoint: Path) -> Path:
    """Moves a checkpoint, leaves a link in its place, and returns the new folder."""
    target = checkpoint.parents[1] / "other disk" / checkpoint.name
    target.parent.mkdir(exist_ok=True)
    shutil.move(checkpoint, target)
    checkpoint.symlink_to(target)
    return target


@pytest.mark.parametrize("then", [{"step": 3, "keep": 1}, {"step": 2}])
def test_a_link_to_a_checkpoint_is_removed_and_its_target_stays(tmp_path, then):
    root = tmp_path / "run"
    save(root, 1)
    target = moved_and_linked(save(root, 2))
    assert latest_checkpoint(root) == root / "checkpoint-2"
    assert load_checkpoint(root / "checkpoint-2", accelerator=Accelerator(cpu=True)).step == 2
    for _ in range(2):
        save(root, **then)
    assert is_complete(target)
    assert not any(path.is_symlink() for path in root.iterdir())
    assert latest_checkpoint(root) == root / f"checkpoint-{then['step']}"


def test_a_link_to_nothing_is_passed_over_by_name_and_keeps_nothing_from_being_saved(tmp_path):
    root = tmp_path / "run"
    save(root, 1)
    shutil.rmtree(moved_and_linked(save(root, 2)))
    with pytest.warns(UserWarning, match="Passing over .*checkpoint-2"):
        assert latest_checkpoint(root) == root / "checkpoint-1"
    save(root, 3, keep=1)
    assert is_complete(save(root, 2, keep=2))
    assert sorted(path.name for path in root.iterdir()) == ["_replaced-1-checkpoint-2", "checkpoint-2", "checkpoint-3"]


@pytest.mark.parametrize("name", ONE)
def test_a_run_goes_on_from_a_link_and_removes_old_ones(name: str, tmp_path: Path):
    root = tmp_path / "checkpoints"
    root.symlink_to(tmp_path / "disk" / "run")  # the run creates it
    *_, old, newest, last = run_that_keeps_all(name, tmp_path)
    targets = [moved_and_linked(old), moved_and_linked(newest)]
    shutil.rmtree(last)
    works.WORKS[name](tmp_path, "none")
    assert {path.name for path in root.glob("*checkpoint*")} == {newest.name, last.name}
    assert newest.is_symlink()
    assert all(is_complete(folder) for folder in (*targets, last))


# ------------------------------------------------------------------------------------------------ file systems


def refuses_folders(number: int) -> Callable[[int], None]:
    """Returns an os.fsync that rejects folders."""
    flush = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        flush(descriptor)

    return fsync


def statvfs_raises(path: Any) -> Any:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def warnings_of(text: str, seen: pytest.WarningsRecorder) -> int:
    return sum(text in str(one.message) for one in seen)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO, errno.EBADF, errno.ENOTSUP, errno.EACCES])
def test_a_file_system_that_flushes_no_folders_is_named_once(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "fsync", refuses_folders(number))
    with pytest.warns(UserWarning, match="does not flush folders") as seen:
        [save(tmp_path, step, keep=2) for step in (1, 2, 3)]
    assert warnings_of("does not flush folders", seen) == 1
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-3"


@pytest.mark.parametrize("name", ONE)
def test_trainers_save_where_folders_are_not_flushed_and_the_room_is_not_told(tmp_path, monkeypatch, name):
    monkeypatch.setattr(os, "fsync", refuses_folders(errno.EINVAL))
    monkeypatch.setattr(os, "statvfs", statvfs_raises)
    with pytest.warns(UserWarning, match="does not flush folders") as seen:
        works.WORKS[name](tmp_path, "none")
    assert warnings_of("does not flush folders", seen) == 1
    assert warnings_of("does not tell how much room", seen) == int(not name.startswith(("ppo", "ddpo")))
    assert latest_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / f"checkpoint-{works.STEPS}"


def test_no_blocks_at_all_are_no_full_disk(tmp_path, monkeypatch):
    none = SimpleNamespace(f_frsize=0, f_blocks=0, f_bfree=0, f_bavail=0)
    monkeypatch.setattr(os, "statvfs", lambda path: none)
    assert free_bytes(tmp_path) is None


def test_a_refused_save_is_explained_where_the_file_system_does_not_tell_its_room(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "statvfs", statvfs_raises)
    monkeypatch.setattr(saved_by_us, "save_file", full)
    with pytest.raises(SaveError, match="an unknown number of bytes are free"):
        save(tmp_path, 1)


def test_a_file_that_cannot_be_flushed_is_an_error(tmp_path, monkeypatch):
    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(SaveError, match=os.strerror(errno.EIO)):
        save(tmp_path, 1)
    assert latest_checkpoint(tmp_path) is None
