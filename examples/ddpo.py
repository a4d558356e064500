"""DDPO: a diffusion model learns to draw pictures whose JPEG files are large (Black et al. 2023, arXiv:2305.13301).

The model is a Stable Diffusion of 1.0M parameters that draws coloured shapes of 16x16 pixels. The reward is the size of
each picture's file, in kB.

    python examples/ddpo.py             # a few minutes on two cores; --help lists every setting
    python examples/ddpo.py --smoke     # two small epochs
    python examples/ddpo.py --model stable-diffusion-v1-5/stable-diffusion-v1-5 --sample_num_steps 50

You see the mean reward rise from epoch to epoch, and loud contrasts in the pictures that are saved at the end.
"""

import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffusers import StableDiffusionPipeline
from diffusers.utils.logging import disable_progress_bar

from trimtab_common.config import parse_config
from trimtab_diffusion import DDPOConfig, DDPOTrainer
from trimtab_diffusion.rewards import jpeg_incompressibility

SETTINGS = {"num_epochs": 20, "mixed_precision": "no", "sample_num_steps": 10, "sample_guidance_scale": 1.0}
SETTINGS |= {"sample_batch_size": 64, "sample_num_batches_per_epoch": 2, "train_batch_size": 32}
SETTINGS |= {"train_clip_range": 1e-3, "train_warmup_steps": 5, "per_prompt_stat_tracking": True}
SETTINGS |= {"save_freq": 100, "logdir": "runs/examples/ddpo"}
SMOKE = {"num_epochs": 2, "sample_num_steps": 3, "sample_batch_size": 8, "train_batch_size": 4}
SHAPES = Path(__file__).parents[1] / "experiments" / "black_2023_ddpo" / "shapes"
CAPTIONS = [f"a {colour} {shape}" for colour in ("red", "green", "blue") for shape in ("circle", "square", "cross")]


@dataclass(frozen=True)
class RunConfig:
    """The settings that DDPOConfig does not have."""

    model: str = field(default=str(SHAPES), metadata={"help": "Folder or hub id of a Stable Diffusion pipeline."})
    smoke: bool = field(default=False, metadata={"help": "Two small epochs, to see that it runs."})


def caption() -> tuple[str, dict[str, Any]]:
    """A prompt, and its metadata for the reward."""
    return random.choice(CAPTIONS), {}


def main(run: RunConfig, config: DDPOConfig) -> None:
    """Samples pictures, scores them and learns, epoch after epoch."""
    random.seed(config.seed)
    disable_progress_bar()
    pipeline = StableDiffusionPipeline.from_pretrained(run.model)
    trainer = DDPOTrainer(config, jpeg_incompressibility, caption, pipeline)
    for epoch in range(trainer.first_epoch, config.num_epochs):
        updates = trainer.step(epoch, trainer.global_step)
        print(f"epoch {epoch + 1}: {updates} updates, reward {trainer.last_stats['reward_mean']:.4f} kB", flush=True)
        if (epoch + 1) % config.save_freq == 0:
            trainer.save_checkpoint()

    Path(config.logdir).mkdir(parents=True, exist_ok=True)
    pipeline.set_progress_bar_config(disable=True)
    drawing = {"num_inference_steps": config.sample_num_steps, "guidance_scale": config.sample_guidance_scale}
    for picture, text in zip(pipeline(CAPTIONS, **drawing).images, CAPTIONS, strict=True):
        picture.save(Path(config.logdir, f"{text}.png"))


if __name__ == "__main__":
    recipe = SETTINGS | SMOKE if "--smoke" in sys.argv else SETTINGS
    main(*parse_config(RunConfig, DDPOConfig, description=__doc__, recipe=recipe))
