"""Runs on transformers.Trainer that die inside a save resume to the exact bits of an undisturbed run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.processes import launch

ROOT = Path(__file__).parents[3]
TRAINERS = ("sft", "dpo", "reward", "grpo", "iterative_sft")
KILLS = (3, 9, 14, 21)
"""File operations after the start of training at which a session dies; a save has about twenty of them."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns, for each trainer, an undisturbed run, and one that was killed inside four saves."""
    folder = tmp_path_factory.mktemp("runs")
    sessions = [f"{folder}/straight-{name},{name},0" for name in TRAINERS]
    for name in TRAINERS:
        sessions += [f"{folder}/killed-{name},{name},{kill}" for kill in (*KILLS, 0)]
    keep = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = keep | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.lm.hf.run_resume", *sessions]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_a_run_killed_inside_its_saves_ends_like_the_run_that_was_left_alone(runs, name):
    killed, straight = runs / f"killed-{name}", runs / f"straight-{name}"
    one, other = (torch.load(folder / "final.pt", weights_only=True) for folder in (killed, straight))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[weight], other[weight]) for weight in one)
    assert (killed / "history.json").read_text() == (straight / "history.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_one_sealed_checkpoint_and_no_remnant_stay(runs, name):
    folders = [path for path in (runs / f"killed-{name}").iterdir() if path.is_dir() and "checkpoint" in path.name]
    assert [path.name for path in folders] == ["checkpoint-4"]
    assert (folders[0] / "manifest.json").exists()


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_stop_and_resume_to_the_bits_of_the_run_that_went_through(tmp_path):
    for session in (f"{tmp_path}/straight,grpo,9", f"{tmp_path}/stopped,grpo,2", f"{tmp_path}/stopped,grpo,9"):
        launch("tests.lm.hf.run_distributed", session, processes=2)
    one, other = (torch.load(tmp_path / run / "final.pt", weights_only=True) for run in ("straight", "stopped"))
    assert all(torch.equal(one[weight], other[weight]) for weight in one)
    files = {path.name for path in (tmp_path / "stopped" / "checkpoint-4").iterdir()}
    assert {"manifest.json", "rng_state_0.pth", "rng_state_1.pth", "rollout_0.pt", "rollout_1.pt"} <= files
