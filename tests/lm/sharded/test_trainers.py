"""Two processes that share parameters, gradients and optimizer state train like one process."""

from typing import Any

import pytest
import torch
from tests.lm.sharded.run_trainers import CASES, ROUGH, trained
from tests.processes import results_of_two

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Returns the results of both processes of one launch."""
    return results_of_two("tests.lm.sharded.run_trainers", tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("case", CASES)
def test_two_sharded_processes_train_as_one(two, case: str, tmp_path):
    sharded, whole = two[0][case], trained(case, str(tmp_path))
    assert len(sharded["logs"]) == len(whole["logs"])
    for mine, yours in zip(sharded["logs"], whole["logs"], strict=True):
        assert mine == pytest.approx(yours, rel=1e-6, abs=1e-9)
    assert sharded["weights"].keys() == whole["weights"].keys()
    for name, weight in whole["weights"].items():
        torch.testing.assert_close(sharded["weights"][name], weight, rtol=1e-6, atol=1e-9, msg=name)
    for kind in ("parameters", "moments"):  # each process holds its share
        parts = [process[case][kind] for process in two]
        assert sum(parts) == pytest.approx(whole[kind], rel=0.01)
        assert max(parts) < 0.6 * whole[kind]


@pytest.mark.parametrize("case", ROUGH)
def test_mixed_precision_rounds_little_and_returns_float32(two, case: str):
    rough, exact = two[0]["bfloat16"][case], two[0][case]
    losses = [log["loss"] for log in exact["logs"] if "loss" in log]
    assert rough["losses"][0] == pytest.approx(losses[0], rel=0.01, abs=0.002)
    assert rough["losses"] == pytest.approx(losses, rel=0.05, abs=0.15)
    assert rough["scores"] == "torch.float32"
    assert rough["masters"] == ["torch.float32"]


def test_a_model_whose_embeddings_several_modules_share_is_refused(two):
    for process in two:
        assert "FSDP2 cannot shard T5ForConditionalGeneration: shared, encoder.embed_tokens" in process["refusal"]
