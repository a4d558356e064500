"""DiffusionNFT: a diffusion model learns to draw in the colours of its captions (Zheng et al. 2025, arXiv:2509.16117).

The model is a Stable Diffusion of 1.0M parameters that draws coloured shapes of 16x16 pixels. The reward is minus the
distance of the colour in a picture's centre from the one in its caption. An ODE samples the pictures.

    python examples/diffusion_nft.py                  # a minute on one core; --help lists every setting
    python examples/diffusion_nft.py --random_rewards # the control: rewards without a meaning
    python examples/diffusion_nft.py --smoke          # two small epochs

You see the reward of each epoch, and at the end that of pictures from the same noise before and after.
"""

import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionPipeline
from diffusers.utils.logging import disable_progress_bar
from torch import Tensor

from trimtab_common.config import parse_config
from trimtab_common.seeding import set_seed
from trimtab_diffusion import DiffusionNFTConfig, DiffusionNFTTrainer

SETTINGS = {"num_epochs": 12, "mixed_precision": "no", "sample_batch_size": 64, "sample_num_batches_per_epoch": 1}
SETTINGS |= {"group_size": 8, "train_batch_size": 32, "train_gradient_accumulation_steps": 2, "save_freq": 100}
SETTINGS |= {"train_timestep_fraction": 0.5, "train_warmup_steps": 5, "train_learning_rate": 1e-4}
SETTINGS |= {"old_decay_rate": 0.05, "logdir": "runs/examples/diffusion_nft"}
SMOKE = {"num_epochs": 2, "sample_num_steps": 4, "sample_batch_size": 8, "group_size": 4, "train_batch_size": 4}
SHAPES = Path(__file__).parents[1] / "experiments" / "black_2023_ddpo" / "shapes"
COLOURS = {"red": (0.9, 0.15, 0.15), "green": (0.15, 0.75, 0.2), "blue": (0.2, 0.3, 0.95), "yellow": (0.95, 0.85, 0.15)}
CAPTIONS = [f"a {colour} {shape}" for colour in COLOURS for shape in ("circle", "square", "triangle", "cross")]


@dataclass(frozen=True)
class RunConfig:
    """The settings that DiffusionNFTConfig does not have."""

    model: str = field(default=str(SHAPES), metadata={"help": "Folder or hub id of a Stable Diffusion pipeline."})
    random_rewards: bool = field(default=False, metadata={"help": "Train on random numbers, as a control."})
    smoke: bool = field(default=False, metadata={"help": "Two small epochs, to see that it runs."})


def alignment(images: Tensor, prompts: tuple[str, ...], metadata: Any = None) -> Tensor:
    """Rewards [B] of images [B, 3, H, W]; 0 is best."""
    wanted = torch.tensor([COLOURS[prompt.split()[1]] for prompt in prompts])
    return -(images[:, :, 6:10, 6:10].mean((2, 3)).cpu() - wanted).norm(dim=1)


def measured(pipeline: Any, count: int) -> float:
    """The mean reward of pictures from the same noise at each call."""
    asked = [CAPTIONS[i % len(CAPTIONS)] for i in range(count)]
    noise = torch.Generator().manual_seed(7)
    images = pipeline(asked, num_inference_steps=10, guidance_scale=1.0, generator=noise, output_type="pt").images
    return float(alignment(images, tuple(asked)).mean())


def main(run: RunConfig, config: DiffusionNFTConfig) -> None:
    """Samples pictures, scores them and learns, epoch after epoch."""
    set_seed(config.seed)
    disable_progress_bar()
    pipeline = StableDiffusionPipeline.from_pretrained(run.model)
    pipeline.set_progress_bar_config(disable=True)
    before = measured(pipeline, count := 16 if run.smoke else 256)
    reward = (lambda images, *_: torch.randn(len(images))) if run.random_rewards else alignment
    trainer = DiffusionNFTTrainer(config, reward, lambda: (random.choice(CAPTIONS), {}), pipeline)
    for epoch in range(trainer.first_epoch, config.num_epochs):
        trainer.step(epoch, trainer.global_step)
        print(f"epoch {epoch + 1}: reward {trainer.last_stats['reward_mean']:.4f}", flush=True)
        if (epoch + 1) % config.save_freq == 0:
            trainer.save_checkpoint()
    print(f"reward {before:.4f} before, {measured(pipeline, count):.4f} after")


if __name__ == "__main__":
    recipe = SETTINGS | SMOKE if "--smoke" in sys.argv else SETTINGS
    main(*parse_config(RunConfig, DiffusionNFTConfig, description=__doc__, recipe=recipe))
