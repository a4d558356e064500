"""PPO on two processes that share policy, critic, reference, gradients and moments equals PPO on one."""

import math
from functools import cache
from typing import Any

import pytest
import torch
from tests.lm.ppo.test_distributed import assert_same_steps
from tests.lm.sharded.run_ppo import BFLOAT16, CASES, CONTINUOUS, LOOPS, REFUSED, make, stepped, trained
from tests.processes import TWO_PROCESSES, results_of_two

pytestmark = TWO_PROCESSES


@cache
def alone(case: str) -> dict[str, Any]:
    """Returns the result of one process."""
    return stepped(case)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns the results of both processes of one launch."""
    return results_of_two("tests.lm.sharded.run_ppo", tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("case", CASES)
def test_two_sharded_processes_are_one(two, case: str):
    assert_same_steps(two[0][case], alone(case))


@pytest.mark.parametrize("case", CASES)
def test_each_process_holds_a_part(two, case: str):
    whole = alone(case)
    for kind in ("local", "moments", "reference"):
        parts = [process[case][kind] for process in two]
        assert sum(parts) == whole[kind]
        assert max(parts) < 0.6 * whole[kind]


@pytest.mark.parametrize("case", CASES)
def test_processes_sample_unequally_often_what_one_process_samples(two, case: str):
    expected = alone(case)["samples"]
    assert two[0][case]["samples"] == two[1][case]["samples"] == expected


def test_train_with_greedy_samples_and_a_reward_model_on_the_side_is_that_of_one_process(two):
    assert_same_steps(two[0]["loop"], trained("loop"))


def test_continuous_batching_samples_from_a_sharded_policy_that_learns(two):
    first, second = [process[CONTINUOUS] for process in two]
    before = make(LOOPS[CONTINUOUS], 1).actor_critic.state_dict()
    assert 1 <= first["stats"][-1]["tokens/responses_len_mean"] <= 5
    assert first["stats"][0]["objective/kl"] == pytest.approx(0, abs=1e-9)  # the policy is its own reference
    assert all(first["stats"][1][name] == second["stats"][1][name] for name in ("objective/kl", "ppo/loss/total"))
    after = first["weights"]
    assert any(not torch.equal(weight, after[name]) for name, weight in before.items())


def test_values_and_log_probabilities_keep_the_digits_that_bfloat16_lacks(two):
    for process in two:
        result = process[BFLOAT16]
        assert result["dtypes"] == ["torch.float32"]
        assert math.isfinite(result["loss"])
        for name in ("values", "logprobs"):
            numbers = result[name][result[name] != 0]
            assert (numbers != numbers.bfloat16()).float().mean() > 0.9, name


def test_version_1_of_fsdp_is_refused(two):
    assert "Set fsdp_version: 2" in two[0][REFUSED]["message"]


def test_updates_stop_early_in_the_case_of_that_name(two):
    assert any(stats["ppo/policy/early_stopped"] > 0 for stats in two[0]["stopped early"]["stats"])
