"""Launchers know every key of their configurations, and docs/engines.md states what the code computes."""

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from transformers import AutoConfig

from trimtab_cli.memory import MemoryConfig, ModelSize, engines, memory, size_of
from trimtab_cli.tables import GIB

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
CONFIGS = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
TRAINED = {
    "all weights": {},
    "with a reference": {"reference": True},
    "with a reference and a critic": {"reference": True, "critic": True},
    "adapters of rank 16": {"lora_rank": 16},
}


def rows_under(heading: str) -> list[list[str]]:
    """Returns the cells of the first table under a heading, without its header."""
    part = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line[:1] == "|"]
    return rows[2:]


@cache
def llama(name: str, lora_rank: int) -> ModelSize:
    file = ROOT / "configs" / "models" / f"llama_{name.lower()}.json"
    return size_of(AutoConfig.from_pretrained(file), MemoryConfig(name, lora_rank=lora_rank))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_accelerate_knows_every_key_of_a_configuration(file: Path):
    config = load_config_from_file(str(file))  # raises ValueError for an unknown key
    flags = vars(launch_command_parser().parse_args(["script.py"]))
    for key in [*(config.fsdp_config or {}), *(config.deepspeed_config or {})]:
        assert key in flags, key


def test_there_is_a_configuration_for_every_way_to_launch():
    assert {file.stem for file in CONFIGS} == {"one_gpu", "ddp", "fsdp2", "zero2", "zero3", "two_nodes"}
    assert set(re.findall(r"configs/accelerate/(\w+)\.yaml", PAGE)) == {file.stem for file in CONFIGS}


@pytest.mark.parametrize("script", sorted((ROOT / "configs" / "slurm").glob("*.sh")), ids=lambda file: file.stem)
def test_a_batch_script_is_valid_bash(script: Path):
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.slow  # counts the operators of a model of 80 layers
def test_the_memory_in_the_docs_is_what_the_function_computes():
    rows = rows_under("Memory per GPU")
    assert {row[0] for row in rows} == {"1B", "7B", "70B"}
    for model, gpus, trained, *cells in rows:
        config = MemoryConfig(model, gpus=int(gpus), **TRAINED[trained])
        names = ["one GPU"] if config.gpus == 1 else ["DDP", "ZeRO-2", "ZeRO-3", "FSDP2"]
        parts = [memory(llama(model, config.lora_rank), engines(config)[name], config) for name in names]
        assert [cell for cell in cells if cell] == [f"{sum(part) / GIB:.0f}" for part in parts], (model, gpus, trained)


def test_every_trainer_and_engine_has_a_cell_that_says_how_it_was_run():
    rows = rows_under("What was run")
    language = ["SFT", "Reward", "DPO", "KTO", "GRPO", "IterativeSFT", "PPO"]
    assert [row[0] for row in rows] == [*language, "DDPO", "DiffusionNFT", "AlignProp", "Diffusion-DPO"]
    for row in rows:
        for cell in row[1:]:
            assert re.fullmatch(r"tested in CI|run by hand \(`.+`, \d{4}-\d\d-\d\d\)|not run|not offered", cell), cell
