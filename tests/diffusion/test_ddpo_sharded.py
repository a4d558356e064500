"""DDPO sharded over two processes (FSDP2) equals DDPO on one; its checkpoints resume on any number of processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from tests.diffusion import modern, tiny
from tests.diffusion.run_ddpo_sharded import BFLOAT16, CALL, CASES, run
from tests.processes import TWO_PROCESSES, launch

MODULE = "tests.diffusion.run_ddpo_sharded"

pytestmark = TWO_PROCESSES


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs each case in one session of two processes; runs `full` and `lora` on two, then one, then two processes."""
    folder = tmp_path_factory.mktemp("runs")
    chains = [(folder / f"chain-{case}", case) for case in ("full", "lora")]
    once = [f"{folder / case},{case},2," for case in (*CASES, BFLOAT16)]
    for where in (*(folder / case for case in (*CASES, BFLOAT16)), *(chain for chain, _ in chains)):
        where.mkdir()
    launch(MODULE, *once, *(f"{chain},{case},1," for chain, case in chains), processes=2)
    launch(MODULE, *(f"{chain},{case},2,yes" for chain, case in chains), processes=1)
    launch(MODULE, *(f"{chain},{case},3,yes" for chain, case in chains), processes=2)
    return folder


def result(file: Path) -> dict[str, Any]:
    return torch.load(file, weights_only=True)


def assert_same(sharded: dict[str, Any], one: dict[str, Any]) -> None:
    assert len(sharded["history"]) == len(one["history"])
    for mine, yours in zip(sharded["history"], one["history"], strict=True):
        mine, yours = ({k: v for k, v in stats.items() if not k.startswith("selfcheck/")} for stats in (mine, yours))
        assert mine == pytest.approx(yours, rel=1e-6, abs=1e-9)
    assert sharded["weights"].keys() == one["weights"].keys()
    for name, weight in sharded["weights"].items():
        torch.testing.assert_close(weight, one["weights"][name], rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_two_sharded_processes_are_one(runs: Path, tmp_path: Path, case: str):
    one = run(tmp_path, case, 2)
    for rank in (0, 1):
        sharded = result(runs / case / f"{case}-2-2-{rank}.pt")
        assert_same(sharded, one)
        assert sharded["local"] < 0.55 * one["local"]
        assert sharded["moments"] < 0.55 * one["moments"]


@pytest.mark.parametrize("case", ["full", "lora"])
def test_epochs_on_two_then_one_then_two_processes_are_those_of_one(runs: Path, tmp_path: Path, case: str):
    parts = [
        result(runs / f"chain-{case}" / f"{case}-{processes}-{epoch}-0.pt")
        for epoch, processes in enumerate((2, 1, 2), start=1)
    ]
    assert_same(parts[-1] | {"history": [stats for part in parts for stats in part["history"]]}, run(tmp_path, case, 3))


@pytest.mark.parametrize("case", ["full", "lora"])
def test_the_saved_folder_is_loaded_without_a_launcher(runs: Path, case: str):
    weights = result(runs / case / f"{case}-2-2-0.pt")["weights"]
    folder = runs / case / f"{case}-2-2"
    if case == "full":
        pipeline = FluxPipeline.from_pretrained(folder, torch_dtype=torch.float64)
    else:
        pipeline = modern.flux(dtype=torch.float64)
        pipeline.load_lora_weights(folder)
    loaded = {name.replace("default_0", "default"): weight for name, weight in pipeline.transformer.named_parameters()}
    for name, weight in weights.items():
        torch.testing.assert_close(loaded[name].double(), weight, rtol=1e-6, atol=1e-7, msg=name)
    images = pipeline("a cat", num_inference_steps=2, output_type="pt", generator=tiny.generator(), **CALL).images
    assert torch.isfinite(images).all()


def test_mixed_precision_returns_float32_and_shards_the_reference(runs: Path):
    for rank in (0, 1):
        outcome = result(runs / BFLOAT16 / f"{BFLOAT16}-2-2-{rank}.pt")
        assert outcome["policy"].dtype == torch.float32
        torch.testing.assert_close(outcome["reference"], outcome["policy"], rtol=0, atol=0)
        assert outcome["held"] < 0.55 * outcome["size"]
