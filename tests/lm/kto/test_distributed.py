"""Two processes train and evaluate KTO like one process that mismatches the rows of each of them."""

from typing import Any

import pytest
import torch
from tests.lm.kto import run_training as kto
from tests.processes import results_of_two

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns the results of both processes of one launch."""
    return results_of_two("tests.lm.kto.run_training", tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", kto.CASES)
def test_two_processes_are_one(name, two, tmp_path):
    one = kto.run(name, tmp_path, processes=1)
    if name != "apo":
        assert any(entry["kl"] > 0 for entry in one["stats"])
    for rank in range(2):
        results = two[rank][name]
        for key, value in one["weights"].items():
            torch.testing.assert_close(results["weights"][key], value, rtol=1e-6, atol=1e-6 * float(value.abs().max()))
        assert results["metrics"] == pytest.approx(one["metrics"], rel=1e-6)
    assert len(one["stats"]) == 3
    for ours, theirs in zip(one["stats"], two[0][name]["stats"], strict=True):
        assert theirs == pytest.approx(ours, rel=1e-6)
