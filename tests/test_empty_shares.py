"""A process with nothing to learn from in a step adds nothing to it, and does not stop the others."""

import math
from typing import Any

import pytest
import torch
from tests.processes import results_of_two
from tests.run_empty_shares import CASES

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Runs all cases in one launch of two processes; returns the results of both."""
    return results_of_two("tests.run_empty_shares", tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one_with_the_share_of_the_other(two, name: str):
    one = CASES[name](1)
    for mine in two:
        assert mine[name]["loss"] == pytest.approx(one["loss"], rel=1e-6, abs=1e-9)
        for key, weight in one["weights"].items():
            torch.testing.assert_close(mine[name]["weights"][key], weight, rtol=1e-6, atol=1e-9, msg=key)
    assert all(math.isfinite(loss) for loss in one["loss"])
    assert any(abs(loss) > 1e-6 for loss in one["loss"])
