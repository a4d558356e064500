"""Diffusion-DPO: a diffusion model learns from pairs of its own pictures, of which the brighter one is preferred.

The paper is Wallace et al. 2023, arXiv:2311.12908. The model is a Stable Diffusion of 1.0M parameters that draws
coloured shapes of 16x16 pixels.

    python examples/diffusion_dpo.py             # two minutes on two cores; --help lists every setting
    python examples/diffusion_dpo.py --smoke     # eight pairs, two passes

You see the share of pairs that the model ranks as the labels do, and how bright its pictures are before and after.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionPipeline
from diffusers.utils.logging import disable_progress_bar
from torch import Tensor

from trimtab_common.config import parse_config
from trimtab_diffusion import DiffusionDPOConfig, DiffusionDPOTrainer

SETTINGS = {"num_epochs": 6, "mixed_precision": "no", "train_batch_size": 32, "train_learning_rate": 1e-4}
SETTINGS |= {"train_warmup_steps": 5, "beta": 500.0, "save_freq": 100, "logdir": "runs/examples/diffusion_dpo"}
SMOKE = {"num_epochs": 2, "train_batch_size": 4}
SHAPES = Path(__file__).parents[1] / "experiments" / "black_2023_ddpo" / "shapes"
CAPTIONS = [f"a {colour} {shape}" for colour in ("red", "green", "blue") for shape in ("circle", "square", "cross")]


@dataclass(frozen=True)
class RunConfig:
    """The settings that DiffusionDPOConfig does not have."""

    model: str = field(default=str(SHAPES), metadata={"help": "Folder or hub id of a Stable Diffusion pipeline."})
    pairs: int = field(default=256, metadata={"help": "Pairs of pictures to sample and label."})
    smoke: bool = field(default=False, metadata={"help": "Eight pairs and two passes, to see that it runs."})


def pictures(pipeline: Any, captions: list[str], seed: int) -> Tensor:
    """Samples pictures [B, 3, H, W] within [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    call = {"num_inference_steps": 10, "guidance_scale": 1.0, "eta": 1.0, "output_type": "pt"}
    return pipeline(captions, generator=generator, **call).images


def main(run: RunConfig, config: DiffusionDPOConfig) -> None:
    """Samples pairs, prefers the brighter picture of each, and learns from them."""
    disable_progress_bar()
    pipeline = StableDiffusionPipeline.from_pretrained(run.model)
    pipeline.set_progress_bar_config(disable=True)
    captions = [CAPTIONS[i % len(CAPTIONS)] for i in range(8 if run.smoke else run.pairs)]
    both = torch.stack([pictures(pipeline, captions, seed) for seed in (1, 2)])  # [2, B, 3, H, W]
    brighter = both.mean((2, 3, 4)).argmax(0)
    rows = [
        {"prompt": caption, "chosen": both[place, i], "rejected": both[1 - place, i]}
        for i, (caption, place) in enumerate(zip(captions, brighter.tolist(), strict=True))
    ]
    before = float(pictures(pipeline, captions, 3).mean())
    trainer = DiffusionDPOTrainer(config, pipeline, rows)
    for stats in trainer.train():
        print(f"epoch {stats['epoch']:.0f}: accuracy {stats['rewards/accuracies']:.2f}, loss {stats['loss']:.3f}")
    print(f"brightness {before:.3f} before, {float(pictures(pipeline, captions, 3).mean()):.3f} after")


if __name__ == "__main__":
    recipe = SETTINGS | SMOKE if "--smoke" in sys.argv else SETTINGS
    main(*parse_config(RunConfig, DiffusionDPOConfig, description=__doc__, recipe=recipe))
