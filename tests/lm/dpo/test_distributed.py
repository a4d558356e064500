"""Two processes train and evaluate DPO like one process."""

from typing import Any

import pytest
import torch
from tests.lm.dpo import run_training as dpo
from tests.processes import results_of_two

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns the results of both processes of one launch."""
    return results_of_two("tests.lm.dpo.run_training", tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", dpo.CASES)
def test_two_processes_are_one(name, two, tmp_path):
    one = dpo.run(name, tmp_path, processes=1)
    for rank in range(2):
        results = two[rank][name]
        for key, value in one["weights"].items():
            torch.testing.assert_close(results["weights"][key], value, rtol=1e-6, atol=1e-6 * float(value.abs().max()))
        assert results["metrics"] == pytest.approx(one["metrics"], rel=1e-6)
    assert len(two[0][name]["stats"]) == 2
    for ours, theirs in zip(one["stats"], two[0][name]["stats"], strict=True):
        if name in ("precomputed", "t5") and ours["step"] == 1:
            assert abs(ours["rewards/margins"]) < 1e-12
            ours["rewards/accuracies"] = theirs["rewards/accuracies"]  # ties, apart from rounding
        assert theirs == pytest.approx(ours, rel=1e-6)
