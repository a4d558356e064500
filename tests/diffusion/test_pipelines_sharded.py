"""AlignProp and Diffusion-DPO sharded over two processes (FSDP2) equal themselves on one."""

from typing import Any

import pytest
import torch
from tests.diffusion.run_pipelines_sharded import CASES, run
from tests.processes import TWO_PROCESSES, results_of_two

pytestmark = TWO_PROCESSES


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of_two("tests.diffusion.run_pipelines_sharded", tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(("name", "use_lora"), CASES)
def test_two_sharded_processes_are_one(two: list[dict[str, Any]], name: str, use_lora: bool):
    alone = run(name, use_lora=use_lora)
    for results in two:
        sharded = results[f"{name}-{use_lora}"]
        assert sharded["local"] < 0.55 * alone["local"]
        for key, weight in sharded["weights"].items():
            torch.testing.assert_close(weight, alone["weights"][key], rtol=1e-6, atol=1e-8, msg=key)
        for mine, its in zip(sharded["history"], alone["history"], strict=True):
            assert mine == pytest.approx(its, rel=1e-5, abs=1e-6)
