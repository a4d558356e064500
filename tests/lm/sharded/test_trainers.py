"""Two processes that share parameters, gradients and optimizer state train as one process does."""

from typing import Any

import pytest
import torch
from tests.lm.sharded.run_trainers import CASES, trained
from tests.processes import results_of_two

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of both processes of one launch."""
    return results_of_two("tests.lm.sharded.run_trainers", tmp_path_factory.mktemp("two"), seconds=800)


@pytest.mark.parametrize("case", CASES)
def test_two_sharded_processes_train_as_one(two, case: str, tmp_path):
    sharded, whole = two[0][case], trained(case, str(tmp_path))
    assert len(sharded["logs"]) == len(whole["logs"])
    for mine, yours in zip(sharded["logs"], whole["logs"], strict=True):
        assert mine == pytest.approx(yours, rel=1e-6, abs=1e-9)
    assert sharded["weights"].keys() == whole["weights"].keys()
    for name, weight in whole["weights"].items():
        torch.testing.assert_close(sharded["weights"][name], weight, rtol=1e-6, atol=1e-9, msg=name)
    for kind in ("parameters", "moments"):  # each process holds its part of them
        parts = [process[case][kind] for process in two]
        assert sum(parts) == pytest.approx(whole[kind], rel=0.01)
        assert max(parts) < 0.6 * whole[kind]
