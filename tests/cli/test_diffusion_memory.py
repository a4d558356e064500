"""The printed memory of DDPO against bytes that its parts have; tests/accelerator compares its peaks."""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from tests.diffusion import tiny

from trimtab_cli.diffusion_memory import Memory, memory, without_weights
from trimtab_cli.main import main
from trimtab_diffusion import DDPOConfig

CONFIG = DDPOConfig(mixed_precision="no", sample_num_steps=2, sample_batch_size=2, train_batch_size=2)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("pipeline")
    tiny.stable_diffusion().save_pretrained(path)
    for weights in path.glob("*/*.safetensors"):
        weights.unlink()
    return path


def counted(folder: Path, lora_rank: int = 0, **settings: Any) -> dict[str, Memory]:
    return memory(without_weights(str(folder)), replace(CONFIG, **settings), lora_rank=lora_rank)


@pytest.mark.slow
def test_weights_gradients_and_moments_are_those_of_the_pipeline(folder: Path):
    pipeline, parts = tiny.stable_diffusion(), counted(folder)
    tensors = [
        chain(part.parameters(), part.buffers()) for part in (pipeline.unet, pipeline.vae, pipeline.text_encoder)
    ]
    assert {part.weights for part in parts.values()} == {sum(tensor.nbytes for tensor in chain(*tensors))}
    trained = sum(weight.nbytes for weight in pipeline.unet.parameters())
    assert [part.gradients for part in parts.values()] == [0, trained]
    assert {part.optimizer for part in parts.values()} == {2 * trained}


@pytest.mark.slow
def test_an_image_and_its_steps_are_recorded(folder: Path):
    """Four images 3 x 16 x 16; noise and steps of 4 x 8 x 8, log-probabilities, and two texts of 16 x 16."""
    size = 4 * (3 * 16 * 16 + 2 * 16 * 16 + 4 * 8 * 8)
    step = 4 * (4 * 8 * 8 + 1)
    recorded = {steps: counted(folder, sample_num_steps=steps)["training"].recorded for steps in (2, 50)}
    assert recorded == {steps: 4 * (size + steps * step) for steps in (2, 50)}


@pytest.mark.slow
def test_adapters_need_no_reference_and_few_moments(folder: Path):
    whole, adapters = (counted(folder, rank, init_kl_coef=0.1)["training"] for rank in (0, 4))
    assert whole.weights > adapters.weights
    assert whole.optimizer > 10 * adapters.optimizer


def test_the_command_prints_sampling_and_training(folder: Path, capsys: Any):
    words = ["--mixed_precision", "no", "--sample_num_steps", "2", "--eval_freq", "1", "--eval_num_steps", "4"]
    assert main(["memory", "ddpo", "--model", str(folder), *words]) == 0
    _, head, *rows = capsys.readouterr().out.splitlines()[-4:]
    assert head.split() == ["part", *Memory._fields, "total"]
    assert [row.split()[0] for row in rows] == ["sampling", "training"]


def test_the_command_says_in_a_line_what_it_cannot_count(tmp_path: Path, capsys: Any):
    with pytest.raises(SystemExit):
        main(["memory", "ddpo", "--model", str(tmp_path)])
    assert "model_index.json" in capsys.readouterr().err.splitlines()[-1]
    assert main(["memory", "nft", "--model", str(tmp_path)]) == 2
    assert "nft, align-prop and diffusion-dpo are not covered" in capsys.readouterr().err
