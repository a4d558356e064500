"""A PPO run that is killed and resumed equals an undisturbed run to the last bit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lm.ppo.run_resume import STEPS

ROOT = Path(__file__).parents[3]
FILE_OPERATIONS = 15


def launch(*sessions: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    keep = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = keep | {"WANDB_MODE": "offline", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    spread = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [sys.executable, *(spread if processes > 1 else []), "-m", "tests.lm.ppo.run_resume", *sessions]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def run(*sessions: str) -> None:
    done = launch(*sessions)
    assert done.returncode == 0, done.stderr[-3000:]


def steps(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"steps-{rank}.jsonl").read_text().splitlines()]


def without_run(line: dict[str, Any]) -> str:
    """Returns the line as text, in which floats are exact and NaN equals itself."""
    return json.dumps({name: value for name, value in line.items() if name != "run_id"}, sort_keys=True)


def assert_same_run(killed: Path, straight: Path, rank: int = 0) -> None:
    """Asserts that every step, before a kill or after it, and the last weights equal those of the straight run."""
    expected = {line["step"]: without_run(line) for line in steps(straight, rank)}
    assert list(expected) == list(range(1, STEPS + 1))
    lines = steps(killed, rank)
    assert {line["step"] for line in lines} == set(expected)
    for line in lines:
        assert without_run(line) == expected[line["step"]], line["step"]
    one, other = (torch.load(folder / f"final-{rank}.pt", weights_only=True) for folder in (killed, straight))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folders of runs: undisturbed, killed at several places, killed at every file operation of a save."""
    folder = tmp_path_factory.mktemp("runs")
    kills = ("reward:4", "update:3", "on_step:5", "reward:7", "end")
    run(
        *(f"{folder}/straight-{loop},{loop},none,end" for loop in ("train", "own")),
        *(f"{folder}/killed-{loop},{loop},none,{kill}" for loop in ("train", "own") for kill in kills),
        *(f"{folder}/saves,train,none,save:{operation}" for operation in range(1, FILE_OPERATIONS + 1)),
        f"{folder}/saves,train,none,end",
    )
    return folder


@pytest.mark.slow
def test_the_run_has_something_to_lose(runs):
    lines = steps(runs / "straight-train")
    assert len({line["kl_coef"] for line in lines}) == STEPS
    assert len({line["stats"]["ppo/learning_rate"] for line in lines}) == STEPS
    assert len({json.dumps(line["prompts"]) for line in lines}) == STEPS
    assert len({length for line in lines for length in line["stats"]["tokens/responses_dist"]}) > 2


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["train", "own"])
def test_killed_in_the_reward_in_an_update_and_after_a_step(runs, loop):
    assert_same_run(runs / f"killed-{loop}", runs / f"straight-{loop}")


@pytest.mark.slow
def test_killed_at_every_file_operation_of_a_save(runs):
    assert_same_run(runs / "saves", runs / "straight-train")
    assert [path.name for path in (runs / "saves").glob("checkpoint-*")] == [f"checkpoint-{STEPS - 1}"]


@pytest.mark.slow
def test_a_fresh_process_goes_on_and_so_does_the_tracker_under_its_id(tmp_path, runs):
    dead = launch(f"{tmp_path},train,wandb,on_step:5")
    assert dead.returncode == -9, dead.stderr[-3000:]
    run(f"{tmp_path},train,wandb,end")
    assert_same_run(tmp_path, runs / "straight-train")
    folders = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    ids = {line["run_id"] for line in steps(tmp_path)}
    assert len(folders) == 2
    assert ids == {name.rpartition("-")[2] for name in folders}


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_go_on_each_with_its_own_prompts_and_noise(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for session, survives in (
        (f"{straight},train,none,end", True),
        (f"{killed},train,none,reward:4", False),
        (f"{killed},train,none,end", True),
    ):
        done = launch(session, processes=2)
        assert (done.returncode == 0) == survives, done.stderr[-3000:]
    for rank in (0, 1):
        assert_same_run(killed, straight, rank)
    assert steps(straight, 0)[0]["prompts"] != steps(straight, 1)[0]["prompts"]
