"""After SIGTERM or SIGINT every trainer ends its step and saves; a resumed run ends like an undisturbed one."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.common.test_tracking import read_wandb
from tests.marks import slow_but
from tests.processes import ROOT, ends_of_two, environment
from tools.chaos.trees import tree_difference

from trimtab_common.sealing import checkpoints, is_complete

Session = Callable[..., int]
QUICK = ("sft",)
LONG = ("ppo", "ppo_step", "iterative_sft", "ddpo", "ddpo_step", "dpo", "reward", "grpo")
EVERY = slow_but([*QUICK, *LONG], *QUICK)
PLACES = [
    ("update", 5),
    pytest.param("save", 1, marks=pytest.mark.slow),
    pytest.param("reward", 9, marks=pytest.mark.slow),
]
SAVED = {"ppo": 1, "ppo_step": 1}  # steps after five updates; a PPO step has eight


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Returns a function that runs a session of tests.run_signals to its end and returns its exit status."""
    command = [sys.executable, "-m", "tests.run_signals"]
    server = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None
    assert server.stdout is not None
    stdin, stdout = server.stdin, server.stdout

    def run(work: str, folder: Path, **more: Any) -> int:
        stdin.write(json.dumps({"work": work, "folder": str(folder), **more}) + "\n")
        stdin.flush()
        return int(stdout.readline())

    yield run
    stdin.close()
    server.wait(timeout=60)


@pytest.fixture(scope="module")
def straight(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Returns a function that returns the final state of an undisturbed run of a work."""
    folder, known = tmp_path_factory.mktemp("straight"), {}

    def left(work: str) -> dict[str, Any]:
        if work not in known:
            assert session(work, folder / work) == 0, (folder / work / "log.txt").read_text()
            known[work] = torch.load(folder / work / "final-0.pt", weights_only=True)
        return known[work]

    return left


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("place", "at"), PLACES)
def test_a_signal_saves_after_its_step_and_the_resumed_run_ends_like_one_left_alone(
    name: str, place: str, at: int, session: Session, straight: Callable[[str], dict[str, Any]], tmp_path: Path
):
    if place == "reward" and name in ("sft", "dpo", "reward", "iterative_sft"):
        pytest.skip("this trainer has no reward function")
    number, status = ("SIGINT", 130) if name in ("ppo", "dpo") else ("SIGTERM", 143)
    sent = {
        "signals": [number],
        "place": place,
        "at": at,
        "settings": {"save_freq" if "ddpo" in name else "save_steps": 3},
    }
    assert session(name, tmp_path / "run", **sent) == status, (tmp_path / "run" / "log.txt").read_text()
    assert not (tmp_path / "run" / "final-0.pt").exists()
    kept = checkpoints(tmp_path / "run" / "checkpoints")
    assert kept
    assert all(is_complete(folder) for folder in kept.values())
    if place == "update":
        assert max(kept) == SAVED.get(name, 3 if "ddpo" in name else 5)
    assert session(name, tmp_path / "run") == 0, (tmp_path / "run" / "log.txt").read_text()
    left = torch.load(tmp_path / "run" / "final-0.pt", weights_only=True)
    assert tree_difference(left, straight(name)) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *LONG])
def test_a_second_signal_ends_the_process_at_once(name: str, session: Session, tmp_path: Path):
    sent = {"signals": ["SIGTERM", "SIGTERM"], "place": "update", "at": 1}
    assert session(name, tmp_path / "run", **sent) == -15
    assert not checkpoints(tmp_path / "run" / "checkpoints")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "sft"])
def test_without_a_folder_for_checkpoints_a_warning_says_that_nothing_is_saved(
    name: str, session: Session, tmp_path: Path
):
    none = {"save_strategy": "no"} if name == "sft" else {"save_steps": None, "output_dir": None}
    sent = {"signals": ["SIGTERM"], "place": "update", "at": 1, "settings": none}
    assert session(name, tmp_path / "run", **sent) == 143
    assert "which is not saved" in (tmp_path / "run" / "log.txt").read_text()
    assert not checkpoints(tmp_path / "run" / "checkpoints")


# ------------------------------------------------------------------------------------------------ trackers


def wandb_records(work: str, folder: Path, session: Session, signals: list[str], status: int) -> Any:
    environment = {"WANDB_MODE": "offline", "WANDB_DIR": str(folder / "run")}
    sent = {"signals": signals, "place": "update", "at": 3, "tracker": "wandb", "environment": environment}
    assert session(work, folder / "run", **sent) == status, (folder / "run" / "log.txt").read_text()
    return read_wandb(folder / "run")


@pytest.mark.slow
@pytest.mark.usefixtures("offline_wandb")
@pytest.mark.parametrize("name", ["ppo", "sft"])
def test_sigterm_marks_wandbs_run_as_preempting_and_closes_it(name: str, session: Session, tmp_path: Path):
    records = wandb_records(name, tmp_path, session, ["SIGTERM"], 143)
    assert len(records["preempting"]) == 1
    assert records["exit"][0].exit_code == 143


@pytest.mark.slow
def test_sigint_closes_wandbs_run_as_failed(session: Session, tmp_path: Path):
    records = wandb_records("ppo", tmp_path, session, ["SIGINT"], 130)
    assert records["preempting"] == []
    assert records["exit"][0].exit_code == 130


@pytest.mark.slow
@pytest.mark.usefixtures("offline_wandb")
def test_sigint_leaves_transformers_run_to_wandb_which_closes_it_as_failed(tmp_path: Path):
    session = {"work": "sft", "folder": str(tmp_path), "signals": ["SIGINT"], "place": "update", "at": 3}
    session |= {"tracker": "wandb", "environment": {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}}
    command = [sys.executable, "-m", "tests.run_signals", json.dumps(session)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode in (130, -signal.SIGINT), done.stderr[-3000:]
    records = read_wandb(tmp_path)
    assert records["preempting"] == []
    assert records["exit"][0].exit_code not in (0, None)
    assert max(checkpoints(tmp_path / "checkpoints")) == 3


# ------------------------------------------------------------------------------------------------ two processes


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["ppo", "ddpo", "sft", "iterative_sft"])
def test_a_signal_that_one_process_gets_stops_both_at_the_same_step(name: str, tmp_path: Path):
    session = {"work": name, "folder": str(tmp_path), "signals": ["SIGTERM"], "place": "update", "at": 3}
    ends = ends_of_two("tests.run_signals", json.dumps(session))
    assert [end.status for end in ends] == [143, 143], ends[0].errors[-2000:] + ends[1].errors[-2000:]
    assert not any("failed in phase" in end.errors for end in ends)
    kept = checkpoints(tmp_path / "checkpoints")
    assert all(is_complete(folder) for folder in kept.values())
    assert max(kept) == {"ppo": 1, "ddpo": 2}.get(name, 3)
