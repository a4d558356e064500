"""Compares four epochs of DDPO with a recorded curve: see `tests.curves`."""

import tempfile
from typing import Any

import torch
from tests.curves import Curve, assert_recorded, record
from tests.diffusion import tiny

from trimtab_diffusion import DDPOConfig, DDPOStableDiffusionPipeline, DDPOTrainer

KEYS = ("reward_mean", "reward_std", "loss", "approx_kl", "clipfrac", "grad_norm", "objective/kl", "objective/kl_coef")
EPOCHS = 4


def brightness(images: torch.Tensor, prompts: Any, metadata: Any) -> torch.Tensor:
    return images.float().mean(dim=(1, 2, 3))


def curve() -> Curve:
    with tempfile.TemporaryDirectory() as folder:
        config = DDPOConfig(
            logdir=folder,
            mixed_precision="no",
            num_epochs=EPOCHS,
            save_freq=100,
            sample_num_steps=4,
            sample_batch_size=4,
            sample_num_batches_per_epoch=2,
            train_batch_size=2,
            train_gradient_accumulation_steps=2,
            train_learning_rate=1e-3,
            per_prompt_stat_tracking=True,
            per_prompt_stat_tracking_min_count=2,
            init_kl_coef=0.01,
            train_clip_range=1e-2,
        )
        words = iter(["cat", "dog"] * 100)
        pipeline = DDPOStableDiffusionPipeline(tiny.stable_diffusion(), use_lora=False)
        trainer = DDPOTrainer(config, brightness, lambda: (next(words), {}), pipeline)
        history = trainer.train()
    return {key: [float(stats[key]) for stats in history] for key in KEYS}


def test_four_epochs_are_the_recorded_ones():
    assert_recorded("ddpo", curve(), rel=1e-3)  # float32: the number of threads changes the fourth digit


if __name__ == "__main__":
    record({"ddpo": curve})
