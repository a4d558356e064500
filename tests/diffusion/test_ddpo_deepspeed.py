"""DDPO under DeepSpeed on two processes equals DDPO on one; run by `make test-deepspeed`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from tests.diffusion import modern
from tests.diffusion.run_ddpo_deepspeed import REFUSED, STAGES, first_weights, run
from tests.diffusion.run_ddpo_sharded import CASES
from tests.processes import TWO_PROCESSES, launch_by_torchrun

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed here: make test-deepspeed")
pytestmark = TWO_PROCESSES


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs each case under each stage, in one session of two processes per stage."""
    folder = tmp_path_factory.mktemp("runs")
    for stage in STAGES:
        sessions = [f"{folder},{case},{stage}" for case in (*CASES, REFUSED)]
        launch_by_torchrun("tests.diffusion.run_ddpo_deepspeed", *sessions, processes=2)
    return folder


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_one(runs: Path, tmp_path: Path, case: str, stage: int):
    """In float32, logs agree to 1e-4, and weights to a hundredth of how far they moved."""
    one = run(tmp_path, case)
    before = dict(first_weights(case))
    moves = {name: float((weight - before[name]).abs().max()) for name, weight in one["weights"].items()}
    assert max(moves.values()) > 5e-4
    for rank in (0, 1):
        two: dict[str, Any] = torch.load(runs / f"{case}-{stage}-{rank}.pt")
        assert len(two["history"]) == 2
        for mine, yours in zip(two["history"], one["history"], strict=True):
            mine, yours = (
                {k: v for k, v in stats.items() if not k.startswith("selfcheck/")} for stats in (mine, yours)
            )
            assert mine == pytest.approx(yours, rel=1e-4, abs=1e-5)
        for name, weight in two["weights"].items():
            torch.testing.assert_close(weight, one["weights"][name], rtol=0, atol=5e-6, msg=name)
        if stage == 3:
            assert two["held"] < 0.55 * one["held"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_training_that_would_save_checkpoints_is_refused_before_it_begins(runs: Path, stage: int):
    assert "save_freq=2: DeepSpeed's engine holds weights" in (runs / f"refused-{stage}-0.txt").read_text()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("case", ["full", "lora"])
def test_the_saved_folder_is_loaded_without_a_launcher(runs: Path, case: str, stage: int):
    weights = torch.load(runs / f"{case}-{stage}-0.pt")["weights"]
    if case == "full":
        pipeline = FluxPipeline.from_pretrained(runs / f"{case}-{stage}")
    else:
        pipeline = modern.flux()
        pipeline.load_lora_weights(runs / f"{case}-{stage}")
    loaded = {name.replace("default_0", "default"): weight for name, weight in pipeline.transformer.named_parameters()}
    for name, weight in weights.items():
        torch.testing.assert_close(loaded[name].float(), weight.float(), rtol=1e-5, atol=1e-7, msg=name)
