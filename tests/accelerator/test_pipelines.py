"""DDPO trains every pipeline on an accelerator, the other trainers two; all resume to the same bits."""

import gc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchHeunDiscreteScheduler
from tests.accelerator.runs import ACCELERATOR
from tests.diffusion import test_modern_pipelines as modern
from tests.diffusion import tiny
from tests.diffusion.run_diffusion_dpo_distributed import rows_of
from tests.diffusion.test_modern_pipelines import Turns, brightness, differing, weights

from trimtab_diffusion import (
    AlignPropConfig,
    AlignPropTrainer,
    DDPOConfig,
    DDPOStableDiffusionPipeline,
    DDPOTrainer,
    DiffusionDPOConfig,
    DiffusionDPOTrainer,
    DiffusionNFTConfig,
    DiffusionNFTTrainer,
)

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
    prompts = [("a cat", {}), ("two dogs", {})]
    return DDPOTrainer(DDPOConfig(**defaults | settings), brightness, Turns(), pipeline, eval_prompts=prompts)


def by_gradient(kind: str, folder: Path, *, use_lora: bool, **settings: Any) -> AlignPropTrainer:
    with tiny.from_seed(1):
        pipeline = DDPOStableDiffusionPipeline(BUILD[kind](), use_lora=use_lora)
    defaults: dict[str, Any] = {
        "logdir": str(folder),
        "sample_num_steps": 3,
        "train_batch_size": 2,
        "train_gradient_accumulation_steps": 2,
        "train_learning_rate": 1e-2,
    }
    return AlignPropTrainer(AlignPropConfig(**defaults | settings), brightness, Turns(), pipeline)


def by_pairs(kind: str, folder: Path, *, use_lora: bool, **settings: Any) -> DiffusionDPOTrainer:
    with tiny.from_seed(1):
        pipeline = DDPOStableDiffusionPipeline(BUILD[kind](), use_lora=use_lora)
    defaults: dict[str, Any] = {
        "logdir": str(folder),
        "num_epochs": 2,
        "beta": 10,  # with more, fp16 skips all of these few updates
        "train_batch_size": 2,
        "train_gradient_accumulation_steps": 2,
        "train_learning_rate": 1e-3,
    }
    return DiffusionDPOTrainer(DiffusionDPOConfig(**defaults | settings), pipeline, rows_of(8))


def by_regression(kind: str, folder: Path, *, use_lora: bool, **settings: Any) -> DiffusionNFTTrainer:
    with tiny.from_seed(1):
        pipeline = DDPOStableDiffusionPipeline(BUILD[kind](), use_lora=use_lora)
    solver = settings.pop("solver", None)
    defaults: dict[str, Any] = {
        "logdir": str(folder),
        "sample_num_steps": 3,
        "sample_batch_size": 2,
        "group_size": 2,
        "train_batch_size": 4,
        "train_gradient_accumulation_steps": 1,
        "train_learning_rate": 1e-2,
        "old_decay_rate": 0.3,
    }
    chosen = solver and solver.from_config(pipeline.scheduler.config)
    return DiffusionNFTTrainer(DiffusionNFTConfig(**defaults | settings), brightness, Turns(), pipeline, solver=chosen)


def resumes(kind: str, folder: Path, trainer: Callable[..., Any] = trainer, **settings: Any) -> None:
    straight = trainer(kind, folder, **settings)
    assert straight.accelerator.device.type == ACCELERATOR
    before = weights(straight.sd_pipeline.denoiser)
    history = straight.train(2)
    assert all(torch.isfinite(torch.tensor(stats["loss"])) for stats in history)
    after = weights(straight.sd_pipeline.denoiser)
    assert differing(straight.sd_pipeline.denoiser, before)

    checkpoint = str(folder / "checkpoints" / "checkpoint-1")
    again = trainer(kind, folder, resume_from=checkpoint, **settings)
    again.step(1, again.global_step)
    assert not differing(again.sd_pipeline.denoiser, after)


@pytest.mark.parametrize("use_lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", BUILD)
def test_every_pipeline(kind: str, use_lora: bool, tmp_path: Path):
    resumes(kind, tmp_path, use_lora=use_lora, mixed_precision="no", eval_freq=2)


@pytest.mark.parametrize("use_lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["sd", "sd3"])
def test_mixed_precision(kind: str, precision: str, use_lora: bool, tmp_path: Path):
    resumes(kind, tmp_path, use_lora=use_lora, mixed_precision=precision)


LAST = {"truncated_backprop_rand": False, "truncated_backprop_timestep": 2, "low_variance_samples": 2}


@pytest.mark.parametrize("settings", [{}, LAST], ids=["random", "low variance"])
@pytest.mark.parametrize("use_lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["sd", "sd3"])
def test_gradients_of_rewards(kind: str, precision: str, use_lora: bool, settings: dict[str, Any], tmp_path: Path):
    resumes(kind, tmp_path, by_gradient, use_lora=use_lora, mixed_precision=precision, **settings)


def test_a_differentiable_reward_on_another_device(tmp_path: Path):
    trained = by_gradient("sd", tmp_path, use_lora=True, mixed_precision="no")
    trained.reward_fn = lambda images, *_: images.cpu().mean((1, 2, 3))
    stats = trained.train(1)[0]
    assert stats["grad_norm"] > 0


@pytest.mark.parametrize("use_lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["sd", "sd3"])
def test_pairs_of_pictures(kind: str, precision: str, use_lora: bool, tmp_path: Path):
    resumes(kind, tmp_path, by_pairs, use_lora=use_lora, mixed_precision=precision)


def test_a_reference_that_predicts_first_is_not_on_the_device_later(tmp_path: Path, device: ModuleType):
    """Its weights are a fourth of what AdamW and the policy hold: weights, gradients and two moments."""
    peaks = []
    for ahead in (False, True):
        trained = by_pairs(
            "sd", tmp_path / str(ahead), use_lora=False, mixed_precision="no", precompute_ref_errors=ahead
        )
        trained.step(0, 0)
        gc.collect()
        device.clear()
        trained.step(1, trained.global_step)
        peaks.append(device.peak())
        size = sum(weight.nbytes for weight in trained.model.parameters())
        del trained
        gc.collect()
    assert peaks[0] - peaks[1] == pytest.approx(size, rel=0.05)


@pytest.mark.parametrize("use_lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["sd", "sd3"])
def test_regression_on_samples(kind: str, precision: str, use_lora: bool, tmp_path: Path):
    resumes(kind, tmp_path, by_regression, use_lora=use_lora, mixed_precision=precision)


@pytest.mark.parametrize(
    ("kind", "solver"),
    [("sd", DPMSolverMultistepScheduler), ("sd3", FlowMatchHeunDiscreteScheduler)],
)
def test_solvers(kind: str, solver: Any, tmp_path: Path):
    resumes(kind, tmp_path, by_regression, use_lora=True, mixed_precision="no", solver=solver)
