"""A sharded PPO run resumes from its checkpoints: bit for bit on as many processes, and also on other numbers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.lm.ppo.test_distributed import assert_same_steps
from tests.lm.sharded.run_ppo import llama, lora
from tests.lm.sharded.run_ppo_resume import run
from tests.processes import TWO_PROCESSES, launch
from torch.distributed.checkpoint import FileSystemReader

from trimtab_common.sealing import CheckpointError, verify
from trimtab_lm import AutoModelForCausalLMWithValueHead

MODULE = "tests.lm.sharded.run_ppo_resume"

pytestmark = TWO_PROCESSES


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs four steps in one session and in two; and, with another model, three steps on two, one and two processes."""
    folder = tmp_path_factory.mktemp("runs")
    whole, cut, llama_run = folder / "whole", folder / "cut", folder / "llama"
    sessions = [f"{whole},train,4,", f"{cut},train,2,", f"{cut},train,4,yes", f"{llama_run},step,1,"]
    launch(MODULE, *sessions, f"{folder}/lora,step,1,", f"{folder}/lora,step,2,yes", processes=2)
    launch(MODULE, f"{llama_run},step,2,yes", processes=1)
    launch(MODULE, f"{llama_run},step,3,yes", processes=2)
    return folder


def result(file: Path) -> dict[str, Any]:
    return torch.load(file, weights_only=True)


def exact(stats: dict[str, Any]) -> dict[str, Any]:
    """Returns the statistics without the clock as text, in which floats are exact and NaN equals itself."""
    numbers = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in stats.items()}
    return {name: json.dumps(value) for name, value in numbers.items() if not name.startswith("time/")}


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_go_on_to_the_last_bit(runs, rank):
    whole, cut = (result(runs / name / f"train-2-4-{rank}.pt") for name in ("whole", "cut"))
    assert whole["samples"][2:] == cut["samples"]
    assert [exact(stats) for stats in whole["stats"][2:]] == [exact(stats) for stats in cut["stats"]]
    assert whole["weights"].keys() == cut["weights"].keys()
    assert all(torch.equal(weight, cut["weights"][name]) for name, weight in whole["weights"].items())


def test_steps_on_two_then_one_then_two_processes_are_those_of_one(runs, tmp_path):
    parts = [result(runs / "llama" / f"step-{count}-{step}-0.pt") for step, count in enumerate((2, 1, 2), start=1)]
    chain = {**parts[-1], "stats": [stats for part in parts for stats in part["stats"]]}
    assert_same_steps(chain, run(tmp_path / "llama", "step", 3, is_resumed=False))


def test_a_checkpoint_holds_each_processes_parts_under_its_seal(runs):
    checkpoint = runs / "llama" / "checkpoint-3"
    files = verify(checkpoint)["files"]
    assert {"shards/__0_0.distcp", "shards/__1_0.distcp", "shards/.metadata"} <= files.keys()
    trained = sum(weight.numel() * 8 for weight in llama().parameters())  # float64
    parts = [files[f"shards/__{rank}_0.distcp"]["bytes"] for rank in (0, 1)]
    assert min(parts) > 0.9 * 1.5 * trained  # half of the weights and both moments, and headers
    assert max(parts) < 1.2 * min(parts)
    shard = checkpoint / "shards" / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"__1_0.distcp: changed since it was saved"):
        run(runs / "llama", "step", 4, is_resumed=True)


def test_adapters_go_on_from_a_checkpoint_without_their_base_and_are_saved_alone(runs, tmp_path):
    first, second = (result(runs / "lora" / f"step-2-{step}-0.pt") for step in (1, 2))
    chain = {**second, "stats": first["stats"] + second["stats"]}
    assert_same_steps(chain, run(tmp_path / "lora", "step", 2, is_resumed=False))
    trained = {f"policy.{name}" for name, weight in lora().named_parameters() if weight.requires_grad}
    stored = FileSystemReader(runs / "lora" / "checkpoint-2" / "shards").read_metadata().state_dict_metadata
    places = [json.loads(place) for place in stored]
    assert {name for kind, name, *_ in places if kind == "weights"} == trained
    folder = runs / "lora" / "policy-2-2"
    adapters = load_file(folder / "adapter_model.safetensors") | load_file(folder / "value_head.safetensors")
    assert len(adapters) == len(trained)
    saved = {name.replace(".weight", ".default.weight"): weight for name, weight in adapters.items()}
    for name, weight in second["weights"].items():
        if "lora_" in name:
            assert torch.equal(saved[name.removeprefix("policy.pretrained_model.")], weight), name


def test_the_folder_that_save_pretrained_writes_loads_without_a_launcher(runs):
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(runs / "llama" / "policy-2-3", dtype=torch.float64)
    weights = result(runs / "llama" / "step-2-3-0.pt")["weights"]
    assert {f"policy.{name}" for name in loaded.state_dict()} == set(weights)
    for name, weight in loaded.state_dict().items():
        assert torch.equal(weight, weights[f"policy.{name}"]), name
