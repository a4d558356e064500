"""Dividing a global batch into minibatches or among processes does not change statistics and weights."""

from typing import Any

import pytest
import torch
from tests.lm.ppo.run_distributed import CASES, GLOBAL_BATCH, loop, steps
from tests.processes import results_of_two
from torch import Tensor

TOLERANCE = {"rtol": 1e-6, "atol": 1e-9}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def assert_same_steps(one: dict[str, Any], other: dict[str, Any]) -> None:
    for mine, yours in zip(one["stats"], other["stats"], strict=True):
        assert mine.keys() == yours.keys()
        for name, value in mine.items():
            if name.startswith("time/"):
                continue
            if isinstance(value, Tensor):
                torch.testing.assert_close(value.sort().values, yours[name].sort().values, **TOLERANCE, msg=name)
            else:
                assert value == pytest.approx(yours[name], rel=1e-6, abs=1e-9, nan_ok=True), name
    assert one["kl_coef"] == pytest.approx(other["kl_coef"], rel=1e-9)
    assert one["weights"].keys() == other["weights"].keys() != set()
    for name, weight in one["weights"].items():
        torch.testing.assert_close(weight, other["weights"][name], **TOLERANCE, msg=name)


def alone(name: str) -> dict[str, Any]:
    case = CASES[name]
    if case.doubles_accumulation:
        return steps(case, minibatch=case.minibatch, accumulation=2 * case.accumulation)
    return steps(case, minibatch=2 * case.minibatch, accumulation=case.accumulation)


@pytest.mark.parametrize("name", ["plain", "masks", "encoder-decoder", "llama", "t5", "scaled"])
def test_accumulation_does_not_matter(name):
    whole = steps(CASES[name], minibatch=GLOBAL_BATCH, accumulation=1)
    for minibatch in (1, 4):
        cut = steps(CASES[name], minibatch=minibatch, accumulation=GLOBAL_BATCH // minibatch)
        assert_same_steps(cut, whole)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns the results of both processes of one launch."""
    return results_of_two("tests.lm.ppo.run_distributed", tmp_path_factory.mktemp("two"))


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(two, name):
    assert_same_steps(two[0][name], alone(name))


@pytest.mark.distributed
def test_both_processes_hold_the_same_to_the_bit(two):
    for name in CASES:
        first, second = two[0][name], two[1][name]
        for mine, yours in zip(first["stats"], second["stats"], strict=True):
            assert mine.keys() == yours.keys()
            for key, value in mine.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(yours[key])), (name, key)
        assert all(torch.equal(first["weights"][key], second["weights"][key]) for key in first["weights"])


@pytest.mark.distributed
def test_the_cases_are_what_they_say(two):
    """With two epochs and one minibatch per process, the second exceeds the threshold on one process, or on both."""
    assert [stats["ppo/policy/skipped"] for stats in two[0]["one process skips"]["stats"]] == [0.25, 0.25]
    assert [stats["ppo/policy/skipped"] for stats in two[0]["both processes skip"]["stats"]] == [1.0, 1.0]
    assert all(0 < stats["ppo/policy/early_stopped"] < 1 for stats in two[0]["stopped early"]["stats"])
    assert two[0]["scaled"]["kl_coef"] != 0.5


@pytest.mark.distributed
def test_the_loop_shares_the_prompts_and_samples_differ_between_processes(two):
    first, second, single = two[0]["train"], two[1]["train"], loop()
    for mine, yours, whole in zip(first["queries"], second["queries"], single["queries"], strict=True):
        assert mine + yours == whole
    assert first["same_query"] != second["same_query"]
    assert all(torch.equal(first["weights"][name], second["weights"][name]) for name in first["weights"])
    for step, stats in enumerate(first["stats"]):
        lengths = [len(text) for part in (first, second) for text in part["responses"][step]]
        assert stats["env/reward_mean"] == pytest.approx(sum(lengths) / len(lengths))
        assert stats["ppo/mean_scores"] == pytest.approx(sum(lengths) / len(lengths))
        assert sorted(stats["env/reward_dist"].tolist()) == sorted(lengths)
