"""Two processes that share the rows fine-tune, evaluate and log like one process."""

from typing import Any

import pytest
import torch
from tests.lm.sft.run_distributed import CASES, STEPS, stepped, trained
from tests.processes import results_of_two

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns the results of both processes of one launch."""
    return results_of_two("tests.lm.sft.run_distributed", tmp_path_factory.mktemp("two"))


def assert_close(results: dict[str, Any], expected: dict[str, Any]) -> None:
    for mine, yours in zip(results, expected, strict=True):
        assert mine == pytest.approx(yours, rel=1e-6)


def assert_same_weights(
    weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float = 1e-6
) -> None:
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=rtol, atol=rtol * float(weight.abs().max()), msg=name)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(two, name: str, tmp_path):
    results, expected = two[0]["sft"][name], trained(name, str(tmp_path))
    assert_close([*results["logs"], results["metrics"]], [*expected["logs"], expected["metrics"]])
    assert_same_weights(results["weights"], expected["weights"])
    assert len(results["logs"]) == 3


@pytest.mark.parametrize("name", STEPS)
def test_two_processes_with_half_of_the_rows_take_the_same_step(two, name: str, tmp_path):
    results, expected = two[0]["steps"][name], stepped(name, str(tmp_path))
    assert_close(results["stats"], expected["stats"])
    assert_same_weights(results["weights"], expected["weights"])


def test_both_processes_hold_the_same_to_the_bit(two):
    for kind in ("sft", "steps"):
        for name, mine in two[0][kind].items():
            yours = two[1][kind][name]
            assert_same_weights(mine["weights"], yours["weights"], rtol=0)
            assert {key: mine[key] for key in mine if key != "weights"} == {
                key: yours[key] for key in yours if key != "weights"
            }
    assert_same_weights(two[0]["adapters"], two[1]["adapters"], rtol=0)


def test_unequal_numbers_of_rows_are_an_error_on_both(two):
    assert two[0]["unequal rows"] == two[1]["unequal rows"]
    assert "[3, 4] rows" in two[0]["unequal rows"]
