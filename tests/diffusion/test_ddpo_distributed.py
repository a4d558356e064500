"""Dividing an update's images among processes leaves weights, advantages and statistics unchanged."""

from typing import Any

import pytest
import torch
from tests.diffusion.run_ddpo_distributed import CASES, ORDINARY, PROMPTS, run
from tests.processes import results_of_two

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Runs all cases in one launch of two processes; returns the results of both."""
    return results_of_two("tests.diffusion.run_ddpo_distributed", tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(two, name):
    one = run(name)
    for key, weight in two[0][name]["weights"].items():
        torch.testing.assert_close(weight, one["weights"][key], rtol=1e-6, atol=1e-9, msg=key)
    advantages = torch.cat([two[0][name]["advantages"], two[1][name]["advantages"]], 1)
    torch.testing.assert_close(advantages, one["advantages"], rtol=1e-6, atol=1e-6)
    assert float(one["advantages"].abs().max()) > 0.5
    for mine, yours in zip(two[0][name]["history"], one["history"], strict=True):
        assert mine == pytest.approx(yours, rel=1e-5, abs=1e-7)
    assert abs(one["history"][-1]["loss"]) > 1e-5
    assert one["history"][-1]["grad_norm"] > 0.5  # the norm of the average over processes is clipped


@pytest.mark.parametrize("name", CASES)
def test_both_processes_hold_the_same_to_the_bit(two, name):
    first, second = two[0][name], two[1][name]
    assert all(torch.equal(weight, second["weights"][key]) for key, weight in first["weights"].items())
    assert first["history"] == second["history"]


def test_both_processes_know_all_rewards_of_a_prompt(two):
    mine, yours = two[0]["per_prompt"]["prompt_stats"], two[1]["per_prompt"]["prompt_stats"]
    assert mine == yours
    assert {prompt: len(rewards) for prompt, rewards in mine.items()} == dict.fromkeys(PROMPTS, 4)


@pytest.mark.parametrize("name", ORDINARY)
def test_weights_stay_equal_while_each_process_draws_its_own(two, name):
    """Gradients are averaged for every pipeline, and also with adapters and reward-weighted regression."""
    first, second = two[0][name], two[1][name]
    assert not torch.equal(first["noise"], second["noise"])
    assert all(torch.equal(weight, second["weights"][key]) for key, weight in first["weights"].items())
    assert any(not torch.equal(weight, first["before"][key]) for key, weight in first["weights"].items())
