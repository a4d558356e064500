"""Pretrains a small Stable Diffusion of coloured shapes: `python -m experiments.black_2023_ddpo.pretrain`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor

from experiments.assets.registry import build_once, cache_dir
from experiments.black_2023_ddpo.shapes import CAPTIONS, draw
from experiments.patch_vae import patch_autoencoder, patches, principal_components
from experiments.small_pipeline import (
    caption_tokens,
    denoising_loss,
    optimizer_steps,
    save_in_half_precision,
    stable_diffusion,
    word_tokenizer,
)

LATENT_CHANNELS, TOKENS, TEXT_WIDTH = 6, 8, 32
SHIPPED = Path(__file__).with_name("shapes")
STEPS, BATCH, LEARNING_RATE, UNPROMPTED = 700, 64, 2e-3, 0.1


def shapes_pipeline(steps: int = STEPS) -> Path:
    """Returns the folder of a StableDiffusionPipeline for 16x16 images of CAPTIONS, in float32.

    The pipeline of the default number of steps is shipped with this file. The first call with another number pretrains
    one and caches it.
    """
    if steps == STEPS:
        return SHIPPED

    def build(folder: Path) -> None:
        pretrained_pipeline(steps).save_pretrained(folder)

    return build_once(cache_dir() / "models" / f"shapes-{steps}-2", build, "pretraining a small Stable Diffusion")


def main() -> None:
    """Pretrains at the default size and writes the pipeline next to this file, with weights in half precision."""
    pipeline = pretrained_pipeline(STEPS)
    save_in_half_precision(pipeline, pipeline.unet, SHIPPED)


def pretrained_pipeline(steps: int, *, seed: int = 0) -> StableDiffusionPipeline:
    """Fits a pipeline to synthetic images: sets the VAE by PCA, and trains text encoder and U-Net to predict noise."""
    generator = torch.Generator().manual_seed(seed)
    images = 2 * draw(torch.randint(len(CAPTIONS), (4096,), generator=generator), generator) - 1
    mean, basis = principal_components(images, LATENT_CHANNELS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = assemble(patch_autoencoder(mean, basis))
        _pretrain(pipeline, mean, basis, steps, generator)
    return pipeline


def assemble(vae: AutoencoderKL) -> StableDiffusionPipeline:
    """Returns a pipeline of `vae`, an untrained U-Net of 0.8M parameters and an untrained CLIP text encoder."""
    unet = UNet2DConditionModel(
        sample_size=8,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=4,  # the number of heads, despite the name
        norm_num_groups=8,
    )
    return stable_diffusion(vae, unet, word_tokenizer(CAPTIONS, TOKENS))


def _pretrain(pipeline: StableDiffusionPipeline, mean: Tensor, basis: Tensor, steps: int, generator: Any) -> None:
    """Trains U-Net and text encoder to predict the noise, on new images at each step."""
    unet, text_encoder = pipeline.unet, pipeline.text_encoder
    captions = caption_tokens(pipeline.tokenizer, [*CAPTIONS, ""])
    parameters = [*unet.parameters(), *text_encoder.parameters()]

    def loss() -> Tensor:
        chosen = torch.randint(len(CAPTIONS), (BATCH,), generator=generator)
        pixels = 2 * draw(chosen, generator) - 1
        latents = ((patches(pixels) - mean) @ (basis / basis.square().sum(0))).permute(0, 3, 1, 2)
        chosen[torch.rand(BATCH, generator=generator) < UNPROMPTED] = len(CAPTIONS)
        return denoising_loss(pipeline, latents, text_encoder(captions)[0][chosen], generator)

    unet.train()
    optimizer_steps(parameters, loss, steps, learning_rate=LEARNING_RATE, weight_decay=1e-4)
    unet.eval()


if __name__ == "__main__":
    main()
