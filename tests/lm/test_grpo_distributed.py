"""However the prompts of a step are divided, among micro-batches or processes, weights and statistics are the same."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lm.run_grpo_distributed import CASES, GLOBAL_BATCH, run

ROOT = Path(__file__).parents[2]
TOLERANCE = {"rtol": 1e-6, "atol": 1e-9}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, weight in one["weights"].items():
        torch.testing.assert_close(weight, other["weights"][name], **TOLERANCE, msg=name)
    for mine, yours in zip([*one["logs"], one["metrics"]], [*other["logs"], other["metrics"]], strict=True):
        assert mine.keys() == yours.keys()
        for name, value in mine.items():
            assert value == pytest.approx(yours[name], rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("name", CASES)
def test_accumulation_does_not_matter(name):
    whole = run(name, batch_size=GLOBAL_BATCH)
    cut = run(name, batch_size=GLOBAL_BATCH // 4, accumulation=4)
    assert_same(cut, whole)
    assert max(abs(entry["loss"]) for entry in whole["logs"]) > 1e-3
    assert len({entry["reward"] for entry in whole["logs"] if "reward" in entry}) > 1


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of both processes of one launch, all cases."""
    folder = tmp_path_factory.mktemp("two")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*launch, "-m", "tests.lm.run_grpo_distributed", str(folder)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(two, name):
    """On five prompts in batches of two, evaluation on two processes sees some twice, and counts them once."""
    assert_same(two[0][name], run(name, batch_size=GLOBAL_BATCH))


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_both_processes_hold_the_same_to_the_bit(two, name):
    first, second = two[0][name], two[1][name]
    assert all(torch.equal(weight, second["weights"][key]) for key, weight in first["weights"].items())
    assert first["metrics"] == second["metrics"]


@pytest.mark.distributed
def test_groups_stay_on_their_process(two):
    """One call of generation a step, of half of the prompts each."""
    half = GLOBAL_BATCH // 2
    for results in two:
        assert results["dapo"]["calls"][:4] == [half] * 4
        assert results["masked"]["calls"][:2] == [2 * half] * 2
