"""A checkpoint folder has one writer: a second one is refused, and a kill frees the folder."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.marks import slow_but
from tests.processes import environment
from tools.chaos import works

from trimtab_common import locks
from trimtab_common.locks import free, hold
from trimtab_common.sealing import CheckpointError, latest_checkpoint

LONG = ("iterative_sft", "ddpo", "dpo", "reward", "grpo")
EVERY = slow_but(["ppo", "sft", *LONG], "ppo", "sft")
WRITER = """
import sys
from pathlib import Path
from trimtab_common.locks import hold
class Run: pass
run = Run()
hold(Path(sys.argv[1]), run)
{before}print("holds", flush=True)
sys.stdin.read()
"""


class Run:
    """A run that holds a folder."""


@contextmanager
def writer(root: Path, *, before: str = "") -> Iterator[subprocess.Popen[str]]:
    """Starts another process that writes to the folder, and executes `before` once it holds the lock."""
    command = [sys.executable, "-c", WRITER.replace("{before}", before), str(root)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(), text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "holds\n"
        yield process
        process.kill()


@pytest.mark.slow
def test_the_first_save_into_a_new_folder_keeps_others_out(tmp_path: Path):
    root = tmp_path / "run" / "checkpoints"
    trainer = works.ppo_trainer(tmp_path, "none", output_dir=None, save_steps=None)
    trainer.save_checkpoint(root)
    command = [sys.executable, "-c", WRITER.replace("{before}", ""), str(root)]
    other = subprocess.run(command, env=environment(), capture_output=True, text=True, input="")
    assert f"process {os.getpid()} on" in other.stderr
    assert "writes here" in other.stderr
    del trainer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EVERY)
def test_a_second_writer_is_refused_and_a_kill_frees_the_folder(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(locks, "PATIENCE", 0.0)
    root = tmp_path / "checkpoints"
    root.mkdir()
    with writer(root) as other:
        with pytest.raises(CheckpointError, match=rf"{root}: process {other.pid} on .* writes here"):
            works.WORKS[name](tmp_path, "none")
        assert latest_checkpoint(root) is None
        other.kill()
        other.wait()
        works.WORKS[name](tmp_path, "none")
    assert latest_checkpoint(root) == root / f"checkpoint-{works.STEPS}"
    if name != "iterative_sft":  # its caller may continue
        assert not (root / "_lock").exists()


def test_a_run_that_was_killed_has_time_to_end(tmp_path: Path):
    with writer(tmp_path) as other:
        other.kill()
        hold(tmp_path, run := Run())
    free(run)


def test_the_objects_of_a_process_share_a_lock_and_the_last_one_frees_it(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(locks, "PATIENCE", 0.0)
    one, other = Run(), Run()
    hold(tmp_path, one)
    hold(tmp_path, other)
    free(one)
    assert (tmp_path / "_lock").read_text().startswith(f"process {os.getpid()} on ")
    del other
    assert not (tmp_path / "_lock").exists()


def test_a_process_that_the_writer_forked_does_not_keep_the_lock(tmp_path: Path):
    forks = "import os\nif os.fork() == 0: sys.stdin.read(); os._exit(0)\n"
    with writer(tmp_path, before=forks) as other:
        other.kill()
        other.wait()
        hold(tmp_path, run := Run())  # the forked process, such as a data loader's worker, still runs
    free(run)


def test_a_folder_that_cannot_be_written_to_is_left_to_the_save(tmp_path: Path):
    hold(tmp_path / "file" / "is" / "no" / "folder", Run())
    assert list(tmp_path.iterdir()) == []
