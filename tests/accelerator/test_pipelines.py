"""DDPO trains every pipeline on an accelerator, and resumes to the same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.diffusion import test_modern_pipelines as modern
from tests.diffusion import tiny
from tests.diffusion.test_modern_pipelines import Turns, brightness, differing, weights

from trimtab_diffusion import DDPOConfig, DDPOStableDiffusionPipeline, DDPOTrainer

pytestmark = [pytest.mark.accelerator, pytest.mark.filterwarnings("ignore")]

BUILD: dict[str, Callable[[], Any]] = {
    **modern.BUILD,
    "sd": tiny.stable_diffusion,
    "sdxl": tiny.stable_diffusion_xl,
    "controlnet": tiny.controlnet,
}


def trainer(kind: str, folder: Path, *, use_lora: bool, **settings: Any) -> DDPOTrainer:
    with tiny.from_seed(1):
        built, arguments = BUILD[kind](), modern.SIZES.get(kind, {})
        if kind == "controlnet":
            built, image = built
            arguments = {"image": image}
        pipeline = DDPOStableDiffusionPipeline(built, use_lora=use_lora, call_kwargs=arguments)
    defaults: dict[str, Any] = {
        "logdir": str(folder),
        "sample_num_steps": 3,
        "sample_eta": 0.7,
        "sample_batch_size": 2,
        "sample_num_batches_per_epoch": 2,
        "train_batch_size": 2,
        "train_clip_range": 1e-2,
        "train_learning_rate": 1e-2,
        "sample_guidance_scale": 3.0,
    }
    return DDPOTrainer(DDPOConfig(**defaults | settings), brightness, Turns(), pipeline)


def resumes(kind: str, folder: Path, **settings: Any) -> None:
    ddpo = trainer(kind, folder, **settings)
    assert ddpo.accelerator.device.type == "musa"
    before = weights(ddpo.sd_pipeline.denoiser)
    history = ddpo.train(2)
    assert all(torch.isfinite(torch.tensor(stats["loss"])) for stats in history)
    after = weights(ddpo.sd_pipeline.denoiser)
    assert differing(ddpo.sd_pipeline.denoiser, before)

    checkpoint = str(folder / "checkpoints" / "checkpoint-1")
    again = trainer(kind, folder, resume_from=checkpoint, **settings)
    again.step(1, again.global_step)
    assert not differing(again.sd_pipeline.denoiser, after)


@pytest.mark.parametrize("use_lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", BUILD)
def test_every_pipeline(kind: str, use_lora: bool, tmp_path: Path):
    resumes(kind, tmp_path, use_lora=use_lora, mixed_precision="no")


@pytest.mark.parametrize("use_lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["sd", "sd3"])
def test_mixed_precision(kind: str, precision: str, use_lora: bool, tmp_path: Path):
    resumes(kind, tmp_path, use_lora=use_lora, mixed_precision=precision)
