"""The chaos tool detects a run that differs, and kills as many processes as it is told to."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import ROOT, environment
from tools.chaos.__main__ import punished
from tools.chaos.comparing import difference
from torch.utils.tensorboard import SummaryWriter

from trimtab_common.checkpoint import Checkpoint


def leave(folder: Path, *, steps: list[int], purge_step: int | None = None, **changes: Any) -> Path:
    """Writes what a run of a few steps leaves behind."""
    left = {"weights": {"w": torch.arange(3.0)}, "optimizer": {"state": [{"step": 4}]}, "logged": [{"loss": 0.5}]}
    folder.mkdir(exist_ok=True)
    torch.save(left | changes, folder / "final-0.pt")
    with SummaryWriter(str(folder / "tensorboard" / "run"), purge_step=purge_step) as writer:
        for step in steps:
            writer.add_scalar("loss", 1 / step, step)
            writer.add_scalar("time/step", torch.rand(()).item(), step)
    return folder


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({}, ""),
        ({"weights": {"w": torch.tensor([0.0, 1.0, 2.0000002])}}, "final-0/weights/w: tensors differ"),
        ({"optimizer": {"state": [{"step": 5}]}}, "final-0/optimizer/state/0/step: 5, 4"),
        ({"logged": []}, "final-0/logged: 0 and 1 entries"),
        ({"steps": [1, 2, 4]}, "/tracker/loss: 3 and 4 entries"),
        ({"steps": [1, 2, 3, 3, 4]}, "/tracker/loss: 5 and 4 entries"),
    ],
)
def test_the_first_difference_is_named(tmp_path: Path, changes: dict[str, Any], where: str):
    straight = leave(tmp_path / "straight", steps=[1, 2, 3, 4])
    run = leave(tmp_path / "run", **{"steps": [1, 2, 3, 4], **changes})
    assert difference(run, straight) == where


def test_steps_that_a_resumed_run_repeats_replace_the_earlier_ones(tmp_path: Path):
    straight = leave(tmp_path / "straight", steps=[1, 2, 3, 4])
    run = leave(tmp_path / "run", steps=[1, 2, 3])
    assert difference(leave(run, steps=[3, 4], purge_step=3), straight) == ""


def test_a_run_that_is_gone_is_not_equal(tmp_path: Path):
    run = leave(tmp_path / "run", steps=[1, 2])
    with pytest.raises(ValueError, match=r"holds no final-<rank>.pt"):
        difference(run, tmp_path / "straight")
    (straight := tmp_path / "straight").mkdir()
    shutil.copy(run / "final-0.pt", straight)
    with pytest.raises(ValueError, match="holds no scalars"):
        difference(run, straight)


@pytest.mark.slow
def test_a_resume_that_loses_the_random_numbers_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Checkpoint, "restore_rng", lambda checkpoint: None)
    row = punished("ppo", tmp_path, 1, "tensorboard", kills=3, seed=0)
    assert "final-0" in row.difference


@pytest.mark.slow
def test_the_short_form_kills_and_finds_no_difference():
    command = [sys.executable, "-m", "tools.chaos", "--short"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "6 kills" in done.stdout
