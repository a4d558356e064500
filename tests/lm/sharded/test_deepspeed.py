"""Two processes under DeepSpeed's ZeRO-2 and ZeRO-3 train like one process without it.

DeepSpeed trains float64 models in float32 too, so the two agree to float32's rounding: losses and statistics to
1e-4. AdamW moves a weight by about the learning rate, 0.01, however small its gradient is, so the rounding of a
gradient near 0 shows: weights agree to a hundredth of the rate.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lm.sharded.run_deepspeed import DEEPSPEED_CASES, PPO_CASES, RESUMED_CASES, trained
from tests.lm.sharded.run_ppo import stepped
from tests.processes import launch_by_torchrun
from transformers import AutoModelForCausalLM

pytest.importorskip("deepspeed", reason="make test-deepspeed runs these tests in a separate environment")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=[2, 3], ids=["ZeRO-2", "ZeRO-3"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """Returns the stage, and the folder where both processes of one launch saved their results."""
    folder = tmp_path_factory.mktemp(f"stage{request.param}")
    launch_by_torchrun("tests.lm.sharded.run_deepspeed", f"{folder};{request.param}", processes=2)
    return request.param, folder


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Returns the results of one process without DeepSpeed."""
    return {case: trained(case, str(tmp_path_factory.mktemp("one"))) for case in DEEPSPEED_CASES}


@pytest.mark.parametrize("case", DEEPSPEED_CASES)
def test_two_processes_train_as_one(run: tuple[int, Path], one: dict[str, dict[str, Any]], case: str):
    stage, folder = run
    two, whole = [torch.load(folder / f"{rank}.pt")[case] for rank in (0, 1)], one[case]
    assert len(two[0]["logs"]) == len(whole["logs"])
    for mine, yours in zip(two[0]["logs"], whole["logs"], strict=True):
        assert mine == pytest.approx(yours, rel=1e-4, abs=1e-5)
    assert two[0]["weights"].keys() == whole["weights"].keys()
    for name, weight in whole["weights"].items():
        # Attention does not depend on the bias of its keys. Its gradient is rounding error, which AdamW scales up.
        if not name.endswith("c_attn.bias"):
            torch.testing.assert_close(two[0]["weights"][name], weight, rtol=0, atol=1e-4, msg=name)
    for kind in ("parameters", "reference"):  # ZeRO-2 divides neither
        parts = [process[kind] for process in two]
        expected = whole[kind] / 2 if stage == 3 else whole[kind]
        assert parts == pytest.approx([expected, expected], rel=0.02)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", PPO_CASES)
def test_ppo_on_two_processes_is_that_on_one(run: tuple[int, Path], case: str):
    stage, folder = run
    two, whole = [torch.load(folder / f"{rank}.pt")[case] for rank in (0, 1)], stepped(case)
    for mine, yours in zip(two[0]["stats"], whole["stats"], strict=True):
        numbers = {name: value for name, value in yours.items() if isinstance(value, float) and "time" not in name}
        assert {name: mine[name] for name in numbers} == pytest.approx(numbers, rel=1e-4, abs=1e-5)
    for name, weight in whole["weights"].items():
        torch.testing.assert_close(two[0]["weights"][name].double(), weight, rtol=0, atol=1e-5, msg=name)
    assert two[0]["samples"] == two[1]["samples"] == whole["samples"]  # processes sample different numbers of rows
    for kind in ("local", "reference"):  # ZeRO-2 divides neither
        parts = [process[kind] for process in two]
        expected = whole[kind] / 2 if stage == 3 else whole[kind]
        assert parts == pytest.approx([expected, expected], rel=0.05)


@pytest.fixture(scope="module", params=[2, 3], ids=["ZeRO-2", "ZeRO-3"])
def resumed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns what the main process saved from the resumed trainings."""
    folder = tmp_path_factory.mktemp(f"resumed{request.param}")
    arguments = [str(folder), str(request.param), *RESUMED_CASES]
    launch_by_torchrun("tests.lm.sharded.run_deepspeed", ";".join(arguments), processes=2)
    return torch.load(folder / "0.pt")


@pytest.mark.parametrize("case", RESUMED_CASES)
def test_a_resumed_training_ends_in_the_same_bits(resumed: dict[str, Any], case: str):
    whole, again = resumed[case]["whole"], resumed[case]["resumed"]
    assert whole
    assert all(torch.equal(weight, again[name]) for name, weight in whole.items())


def test_a_saved_model_loads_without_deepspeed(run: tuple[int, Path]):
    _, folder = run
    model = AutoModelForCausalLM.from_pretrained(folder / "sft")
    trained_weights = torch.load(folder / "0.pt")["sft"]["weights"]
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight.double(), trained_weights[name], rtol=0, atol=0, msg=name)
