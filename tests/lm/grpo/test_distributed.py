"""Dividing a step's prompts among micro-batches or processes does not change weights and statistics."""

from typing import Any

import pytest
import torch
from tests.lm.grpo.run_distributed import CASES, GLOBAL_BATCH, run
from tests.processes import results_of_two

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
    """Returns the results of both processes of one launch."""
    return results_of_two("tests.lm.grpo.run_distributed", tmp_path_factory.mktemp("two"))


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(two, name):
    """With five prompts in batches of two, evaluation on two processes sees some twice, but counts them once."""
    assert_same(two[0][name], run(name, batch_size=GLOBAL_BATCH))


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_both_processes_hold_the_same_to_the_bit(two, name):
    first, second = two[0][name], two[1][name]
    assert all(torch.equal(weight, second["weights"][key]) for key, weight in first["weights"].items())
    assert first["metrics"] == second["metrics"]


@pytest.mark.distributed
def test_groups_stay_on_their_process(two):
    """Each step has one generation call with half of the prompts per process."""
    half = GLOBAL_BATCH // 2
    for results in two:
        assert results["dapo"]["calls"][:4] == [half] * 4
        assert results["masked"]["calls"][:2] == [2 * half] * 2
