"""Pretrains a small Stable Diffusion 3 of emoji: `python -m experiments.emoji.pretrain_flow`."""

from pathlib import Path

import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline
from torch import Tensor

from experiments.emoji.drawings import BASE, CAPTIONS, SIZE, drawings
from experiments.emoji.pretrain import TOKENS, fitted
from experiments.small_flow import Draw, flow_pipeline, pretrain
from experiments.small_pipeline import save_in_half_precision, word_tokenizer

SHIPPED = Path(__file__).with_name("flow")
STEPS = 1600


def main() -> None:
    """Pretrains, and writes the pipeline next to this file with weights in half precision."""
    pipeline = pretrained_flow(drawings(BASE).flatten(0, 1))
    save_in_half_precision(pipeline, pipeline.transformer, SHIPPED)


def pretrained_flow(drawn: Tensor, steps: int = STEPS, *, seed: int = 0) -> StableDiffusion3Pipeline:
    """Fits a pipeline to drawings, as `pretrained_pipeline` does: its transformer learns by flow matching."""

    def make(vae: AutoencoderKL, draw: Draw, generator: torch.Generator) -> StableDiffusion3Pipeline:
        tokenizer = word_tokenizer(CAPTIONS, TOKENS)
        pipeline = flow_pipeline(vae, tokenizer, size=SIZE // 2, patch=2, layers=6, width=128)
        pretrain(pipeline, draw, CAPTIONS, steps, generator)
        return pipeline

    return fitted(drawn, make, seed=seed)


if __name__ == "__main__":
    main()
