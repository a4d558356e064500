"""Two processes that share a batch train, evaluate and log like one process."""

from typing import Any

import pytest
import torch
from tests.lm.reward.run_distributed import trained
from tests.processes import results_of_two

TOLERANCE = {"rtol": 1e-6, "atol": 1e-9}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns the results of both processes of one launch."""
    return results_of_two("tests.lm.reward.run_distributed", tmp_path_factory.mktemp("two"))


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_two_processes_are_one(two, kind: str, tmp_path):
    """Seven pairs, evaluated in batches of two per process: one process's last batch would repeat a pair."""
    one = trained(kind, str(tmp_path))
    for results in (two[0][kind], two[1][kind]):
        for mine, yours in zip(results["logs"], one["logs"], strict=True):
            assert mine == pytest.approx(yours, rel=1e-6, abs=1e-9)
        assert results["metrics"] == pytest.approx(one["metrics"], rel=1e-6, abs=1e-9)
        for name, weight in one["weights"].items():
            torch.testing.assert_close(results["weights"][name], weight, **TOLERANCE, msg=name)
    assert len(one["logs"]) == 3
    assert {"eval_loss", "eval_accuracy", "test_calibration_error"} <= one["metrics"].keys()
