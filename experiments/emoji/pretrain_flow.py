"""Pretrains a small Stable Diffusion 3 of emoji: `python -m experiments.emoji.pretrain_flow`."""

from functools import partial
from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor

from experiments.emoji.drawings import BASE, CAPTIONS, SIZE, drawings
from experiments.emoji.pretrain import TOKENS, rendered_latents, weighed_components
from experiments.patch_vae import patch_autoencoder
from experiments.small_flow import flow_pipeline, pretrain
from experiments.small_pipeline import save_in_half_precision, word_tokenizer

SHIPPED = Path(__file__).with_name("flow")
STEPS = 1600


def main() -> None:
    """Pretrains, and writes the pipeline next to this file with weights in half precision."""
    pipeline = pretrained_flow(drawings(BASE).flatten(0, 1))
    save_in_half_precision(pipeline, pipeline.transformer, SHIPPED)


def pretrained_flow(drawn: Tensor, steps: int = STEPS, *, seed: int = 0) -> StableDiffusion3Pipeline:
    """Fits a pipeline to drawings: sets the VAE by PCA, and trains text encoder and transformer by flow matching.

    Args:
        drawn: A drawing for each of CAPTIONS: RGB and opacity, [144, 4, 64, 64].
        steps: Updates.
        seed: Determines images and weights.

    Returns:
        A pipeline for images of 24x24 pixels, in float32.
    """
    generator = torch.Generator().manual_seed(seed)
    mean, basis = weighed_components(drawn, generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae, tokenizer = patch_autoencoder(mean, basis, SIZE), word_tokenizer(CAPTIONS, TOKENS)
        pipeline = flow_pipeline(vae, tokenizer, size=SIZE // 2, patch=2, layers=6, width=128)
        pretrain(pipeline, partial(rendered_latents, drawn, mean, basis), CAPTIONS, steps, generator)
    return pipeline


if __name__ == "__main__":
    main()
