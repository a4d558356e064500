"""Sharded runs resume from their checkpoints: to the bit on as many processes, to rounding on other numbers."""

from pathlib import Path

import pytest
import torch
from peft.utils import load_peft_weights
from tests.lm.sharded.run_resume import RUNS
from tests.processes import launch
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

Weights = dict[str, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs once without a break, once resumed by two processes, and once resumed by one process and then two."""
    folder = tmp_path_factory.mktemp("runs")
    plan = [("straight:0:3,broken:0:1,broken:1:3,moved:0:1", 2), ("moved:1:2", 1), ("moved:2:3", 2)]
    for sessions, processes in plan:
        launch("tests.lm.sharded.run_resume", f"{folder},{sessions}", processes=processes)
    return folder


@pytest.fixture(scope="module")
def straight(folder: Path) -> Weights:
    """Returns the weights of the run without a break."""
    return torch.load(folder / "straight-3.pt", weights_only=True)


@pytest.mark.parametrize("run", RUNS)
def test_two_processes_resume_to_the_bit(folder, straight, run: str):
    resumed = torch.load(folder / "broken-3.pt", weights_only=True)[run]
    assert resumed.keys() == straight[run].keys()
    for name, weight in resumed.items():
        assert torch.equal(weight, straight[run][name]), name


@pytest.mark.parametrize("run", RUNS)
def test_one_process_and_then_two_resume_a_run_of_two(folder, straight, run: str):
    resumed = torch.load(folder / "moved-3.pt", weights_only=True)[run]
    assert resumed.keys() == straight[run].keys()
    for name, weight in resumed.items():
        torch.testing.assert_close(weight, straight[run][name], rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("run", RUNS)
def test_save_model_gives_a_folder_that_from_pretrained_loads(folder, straight, run: str):
    model = folder / f"straight {run}-model"
    if (model / "adapter_config.json").exists():
        stored = {
            f"{name.removesuffix('.weight')}.default.weight": w for name, w in load_peft_weights(str(model)).items()
        }
        assert len(stored) == 8
    else:
        kind = LlamaForSequenceClassification if run.startswith("reward") else AutoModelForCausalLM
        stored = kind.from_pretrained(model).state_dict()
        assert stored.keys() == straight[run].keys()
    for name, weight in stored.items():
        assert torch.equal(weight, straight[run][name]), name
