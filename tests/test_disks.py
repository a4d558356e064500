"""A full, read-only or missing disk gives one error that says so, and the last good checkpoint stays."""

import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.marks import slow_but
from tests.processes import ends_of_two
from tools.chaos import works
from tools.chaos.trees import tree_difference
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trimtab_common import locks
from trimtab_common.sealing import CheckpointError, checkpoints, latest_checkpoint, verify

LONG = ("iterative_sft", "ddpo", "dpo", "reward", "grpo")
EVERY = slow_but(["ppo", "sft", *LONG], "ppo", "sft")


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """Mounts a small file system in memory at `folder`; skips the test if this user may not mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a file system needs more rights")
    try:
        yield
    finally:
        locks._forget()  # the error's traceback keeps the trainer alive
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def after_the_second_save(root: Path, act: Callable[[], object]) -> Iterator[None]:
    """Acts once, before the first optimizer step that finds two complete checkpoints."""

    def visit(*_: Any) -> None:
        if len(checkpoints(root)) == 2 and not acted:
            acted.append(act())

    acted: list[object] = []
    handle = register_optimizer_step_pre_hook(visit)
    yield
    handle.remove()
    assert acted


def run(name: str, folder: Path) -> None:
    works.WORKS[name](folder, "none")


def assert_explained(text: str, root: Path, *, reason: str) -> None:
    """Asserts that the error names folder, bytes and the last good checkpoint, and that nothing unfinished is left."""
    assert re.search(rf"{root}/checkpoint-\d+ is not saved: .*{reason}", text), text
    needed, free = re.search(r"needs about (\d+) bytes; at \S+ (\d+) bytes are free", text).groups()  # type: ignore[union-attr]
    assert int(needed) > 10_000
    newest = latest_checkpoint(root)
    assert newest is not None
    assert f"The last complete checkpoint is {newest}" in text
    assert all(verify(folder) for folder in checkpoints(root).values())
    assert not [path for path in root.iterdir() if path.name.startswith(".checkpoint")]
    assert int(free) >= 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "size=64m"):
        yield tmp_path / "disk"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EVERY)
def test_a_full_disk(name: str, disk: Path):
    def fill() -> None:
        free = shutil.disk_usage(disk).free
        (disk / "other").write_bytes(b"x" * (free - 20_000))

    with after_the_second_save(disk / "checkpoints", fill), pytest.raises(CheckpointError) as error:
        run(name, disk)
    assert_explained(str(error.value), disk / "checkpoints", reason="")
    (disk / "other").unlink()
    run(name, disk)  # resumes


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("is_late", slow_but([False, True], False))
def test_training_goes_on_without_saving_if_asked_to(name: str, is_late: bool, disk: Path, tmp_path: Path):
    """The disk is full for one save, at the start or near the end; the run ends like one that always saved."""
    root = disk / "checkpoints"
    refused: list[str] = []

    def fill() -> None:
        last = latest_checkpoint(root)
        assert last is not None
        size = sum(file.stat().st_size for file in last.rglob("*"))
        free = shutil.disk_usage(disk).free
        (disk / "other").write_bytes(b"x" * (free - (size - 8192 if is_late else 20_000)))

    def make_room(message: Any, *_: Any, **__: Any) -> None:
        if "is not saved" in str(message):
            refused.append(str(message))
            (disk / "other").unlink()

    with after_the_second_save(root, fill), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = make_room
        works.run(name, disk, "none", on_save_error="warn")
    assert len(refused) == 1
    assert "Training goes on, because on_save_error='warn'" in refused[0]
    assert all(verify(folder) for folder in checkpoints(root).values())
    assert latest_checkpoint(root) == root / f"checkpoint-{works.STEPS}"
    assert not (root / re.findall(r"checkpoint-\d+", refused[0])[0]).exists()
    works.run(name, tmp_path / "straight", "none")
    left = [torch.load(folder / "final-0.pt", weights_only=True) for folder in (disk, tmp_path / "straight")]
    assert tree_difference(*left) == ""


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["ppo", "sft"])
def test_two_processes_go_on_together_without_saving(name: str, disk: Path, tmp_path: Path):
    (straight := tmp_path / "straight").mkdir()
    for folder, state, refused in ((disk, "full", 1), (straight, "empty", 0)):
        ends = ends_of_two("tests.run_full_disk", name, str(folder), state)
        assert [end.status for end in ends] == [0, 0], ends[0].errors[-2000:] + ends[1].errors[-2000:]
        assert [end.output.splitlines()[-1] for end in ends] == [f"refused {refused}"] * 2
    for file in ("final-0.pt", "final-1.pt"):
        left = [torch.load(folder / file, weights_only=True) for folder in (disk, straight)]
        assert tree_difference(*left) == ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EVERY)
def test_a_disk_that_becomes_read_only(name: str, disk: Path):
    def protect() -> None:
        locks._forget()  # unlike a remount, a broken disk does not wait for open files
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)

    with after_the_second_save(disk / "checkpoints", protect), pytest.raises(CheckpointError) as error:
        run(name, disk)
    assert_explained(str(error.value), disk / "checkpoints", reason="Read-only file system")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EVERY)
def test_a_folder_that_is_removed_is_made_again(name: str, tmp_path: Path):
    root = tmp_path / "checkpoints"
    with after_the_second_save(root, lambda: shutil.rmtree(root)):
        run(name, tmp_path)
    newest = latest_checkpoint(root)
    assert newest is not None
    assert newest.name == f"checkpoint-{works.STEPS}"


@pytest.mark.filterwarnings("ignore")
def test_a_folder_that_cannot_be_made_again(tmp_path: Path):
    root = tmp_path / "run" / "checkpoints"

    def replace_by_a_file() -> None:
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").touch()

    with (
        after_the_second_save(root, replace_by_a_file),
        pytest.raises(CheckpointError, match=r"is not saved: .*No checkpoint is complete"),
    ):
        run("ppo", tmp_path / "run")
    assert os.listdir(tmp_path) == ["run"]
