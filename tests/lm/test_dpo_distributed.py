"""Two processes train and evaluate DPO as one does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.lm import run_dpo_training as dpo

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    script = [str(ROOT / "tests/lm/run_dpo_training.py"), str(folder)]
    run = subprocess.run([*command, *script], env=environment, capture_output=True, text=True, timeout=170)
    assert run.returncode == 0, run.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", dpo.CASES)
def test_two_processes_are_one(name, two, tmp_path):
    one = dpo.run(name, tmp_path, processes=1)
    for rank in range(2):
        found = two[rank][name]
        for key, value in one["weights"].items():
            torch.testing.assert_close(found["weights"][key], value, rtol=1e-6, atol=1e-6 * float(value.abs().max()))
        assert found["metrics"] == pytest.approx(one["metrics"], rel=1e-6)
    assert len(two[0][name]["stats"]) == 2
    for ours, theirs in zip(one["stats"], two[0][name]["stats"], strict=True):
        if name == "precomputed" and ours["step"] == 1:
            ours["rewards/accuracies"] = theirs["rewards/accuracies"]  # ties, but for rounding
        assert theirs == pytest.approx(ours, rel=1e-6)
