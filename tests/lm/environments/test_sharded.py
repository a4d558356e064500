"""Processes that share weights all continue until the last episode ends, on whichever process that is."""

from typing import Any

import pytest
import torch
from tests.lm.environments.run_sharded import scripted
from tests.processes import results_of_two

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns the results of both processes of one launch."""
    return results_of_two("tests.lm.environments.run_sharded", tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("trainer", ["grpo", "ppo"])
def test_processes_that_share_the_weights_sample_as_often(two, trainer: str):
    first, second = (process[trainer] for process in two)
    assert len(first["turns"]) == len(second["turns"])
    assert first["turns"] != second["turns"]
    assert first["weights"]
    assert all(torch.equal(weight, second["weights"][name]) for name, weight in first["weights"].items())


def test_ppo_on_two_sharded_processes_learns_from_conversations_as_one_does(two):
    sharded, one = two[0]["scripted"], scripted(world_size=1)
    for mine, yours in zip(sharded["stats"], one["stats"], strict=True):
        assert mine == pytest.approx(yours, rel=1e-6, abs=1e-9)
    assert sharded["weights"].keys() == one["weights"].keys()
    for name, weight in one["weights"].items():
        torch.testing.assert_close(sharded["weights"][name], weight, rtol=1e-6, atol=1e-9, msg=name)
