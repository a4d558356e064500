"""AlignProp: a diffusion model learns to draw in the colour of sand, by the reward's gradient (arXiv:2310.03739).

The model is a Stable Diffusion of 1.0M parameters that draws coloured shapes of 16x16 pixels. The reward is 1
less the distance of a picture's mean colour from that of sand.

    python examples/alignprop.py             # a minute on two cores; --help lists every setting
    python examples/alignprop.py --smoke     # two small updates
    python examples/alignprop.py --model stable-diffusion-v1-5/stable-diffusion-v1-5 --sample_num_steps 50

You see the mean reward rise from update to update, and pictures on sand among those that are saved at the end.
"""

import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffusers import StableDiffusionPipeline
from diffusers.utils.logging import disable_progress_bar
from torch import Tensor

from trimtab_common.config import parse_config
from trimtab_diffusion import AlignPropConfig, AlignPropTrainer

SETTINGS = {"num_epochs": 40, "mixed_precision": "no", "sample_num_steps": 10, "sample_guidance_scale": 1.0}
SETTINGS |= {"train_batch_size": 32, "train_learning_rate": 1e-4, "train_warmup_steps": 5}
SETTINGS |= {"save_freq": 100, "logdir": "runs/examples/alignprop"}
SMOKE = {"num_epochs": 2, "sample_num_steps": 6, "train_batch_size": 4}
SHAPES = Path(__file__).parents[1] / "experiments" / "black_2023_ddpo" / "shapes"
SAND = (0.9, 0.7, 0.4)
CAPTIONS = [f"a {colour} {shape}" for colour in ("red", "green", "blue") for shape in ("circle", "square", "cross")]


@dataclass(frozen=True)
class RunConfig:
    """The settings that AlignPropConfig does not have."""

    model: str = field(default=str(SHAPES), metadata={"help": "Folder or hub id of a Stable Diffusion pipeline."})
    smoke: bool = field(default=False, metadata={"help": "Two small updates, to see that it runs."})


def caption() -> tuple[str, dict[str, Any]]:
    """A prompt, and its metadata for the reward."""
    return random.choice(CAPTIONS), {}


def sandiness(images: Tensor, prompts: tuple[str, ...], metadata: tuple[Any, ...]) -> Tensor:
    """Rewards [B] of images [B, 3, H, W], at most 1, which have a gradient."""
    return 1 - (images.mean((2, 3)) - images.new_tensor(SAND)).norm(dim=1)


def main(run: RunConfig, config: AlignPropConfig) -> None:
    """Samples pictures, scores them and follows the gradient, update after update."""
    random.seed(config.seed)
    if config.truncated_rand_backprop_minmax == AlignPropConfig.truncated_rand_backprop_minmax:
        steps = config.sample_num_steps
        config.truncated_rand_backprop_minmax = (steps // 2, steps - 1)  # the later half
    disable_progress_bar()
    pipeline = StableDiffusionPipeline.from_pretrained(run.model)
    trainer = AlignPropTrainer(config, sandiness, caption, pipeline)
    for epoch in range(trainer.first_epoch, config.num_epochs):
        updates = trainer.step(epoch, trainer.global_step)
        print(f"update {updates}: reward {trainer.last_stats['reward_mean']:.4f}", flush=True)
        if (epoch + 1) % config.save_freq == 0:
            trainer.save_checkpoint()

    Path(config.logdir).mkdir(parents=True, exist_ok=True)
    pipeline.set_progress_bar_config(disable=True)
    drawing = {"num_inference_steps": config.sample_num_steps, "guidance_scale": config.sample_guidance_scale}
    for picture, text in zip(pipeline(CAPTIONS, **drawing).images, CAPTIONS, strict=True):
        picture.save(Path(config.logdir, f"{text}.png"))


if __name__ == "__main__":
    recipe = SETTINGS | SMOKE if "--smoke" in sys.argv else SETTINGS
    main(*parse_config(RunConfig, AlignPropConfig, description=__doc__, recipe=recipe))
