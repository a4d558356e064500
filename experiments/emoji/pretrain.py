"""Pretrains a small Stable Diffusion of emoji: `python -m experiments.emoji.pretrain`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor

from experiments.emoji.drawings import BASE, CAPTIONS, SIZE, TRAINED, drawings, rendered
from experiments.patch_vae import patch_autoencoder, patches, principal_components
from experiments.small_flow import Draw
from experiments.small_pipeline import (
    caption_tokens,
    denoising_loss,
    optimizer_steps,
    save_in_half_precision,
    stable_diffusion,
    word_tokenizer,
)

LATENT_CHANNELS, TOKENS, TEXT_WIDTH = 10, 8, 64
STEPS, BATCH, LEARNING_RATE, UNPROMPTED, AVERAGED = 1400, 64, 1.5e-3, 0.1, 0.995
SHIPPED = Path(__file__).with_name("pipeline")
NUMBERS = torch.tensor([CAPTIONS.index(caption) for caption in TRAINED])  # of the captions to pretrain on

Pipeline = TypeVar("Pipeline")


def main() -> None:
    """Pretrains, and writes the pipeline next to this file with weights in half precision."""
    pipeline = pretrained_pipeline(drawings(BASE).flatten(0, 1))
    save_in_half_precision(pipeline, pipeline.unet, SHIPPED)


def pretrained_pipeline(drawn: Tensor, steps: int = STEPS, *, seed: int = 0) -> StableDiffusionPipeline:
    """Fits a pipeline to drawings: sets the VAE by PCA, and trains text encoder and U-Net to predict v.

    Args:
        drawn: A drawing for each of CAPTIONS: RGB and opacity, [144, 4, 64, 64].
        steps: Updates of BATCH images.
        seed: Determines images and weights.

    Returns:
        A pipeline for images of 24x24 pixels, in float32.
    """

    def make(vae: AutoencoderKL, draw: Draw, generator: torch.Generator) -> StableDiffusionPipeline:
        pipeline = assemble(vae)
        _pretrain(pipeline, draw, steps, generator)
        return pipeline

    return fitted(drawn, make, seed=seed)


def fitted(drawn: Tensor, make: Callable[[AutoencoderKL, Draw, torch.Generator], Pipeline], *, seed: int) -> Pipeline:
    """Makes a pipeline around a VAE that PCA sets.

    Args:
        drawn: A drawing for each of CAPTIONS: RGB and opacity, [144, 4, 64, 64].
        make: Makes and trains the pipeline, from the VAE, from what draws a batch of latents and of their captions'
            numbers, and from the generator for it.
        seed: Determines images and weights.
    """
    generator = torch.Generator().manual_seed(seed)
    mean, basis = weighed_components(drawn, generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(patch_autoencoder(mean, basis, SIZE), partial(rendered_latents, drawn, mean, basis), generator)


def weighed_components(drawn: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Computes the principal components of renderings, with longer columns for coarse components than for fine ones.

    Latents vary with the root of their component's deviation, and by 1 in the mean square, so that noise hides fine
    detail first. If all varied equally, the model would have to choose outline and detail at the same time.

    Args:
        drawn: Drawings: RGB and opacity, [B, 4, 64, 64].
        generator: Determines the renderings.

    Returns:
        The mean [12], and a basis [12, LATENT_CHANNELS]: pixels of a patch = mean + basis latents.
    """
    images = torch.cat([2 * rendered(drawn, generator) - 1 for _ in range(16)])
    mean, basis = principal_components(images, LATENT_CHANNELS)
    deviations = basis.norm(dim=0)
    return mean, basis * (deviations.mean() / deviations).sqrt()


def rendered_latents(drawn: Tensor, mean: Tensor, basis: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draws a batch from the captions of the pretraining: latents [BATCH, C, h, w], and numbers of CAPTIONS [BATCH]."""
    chosen = NUMBERS[torch.randint(len(NUMBERS), (BATCH,), generator=generator)]
    pixels = 2 * rendered(drawn[chosen], generator) - 1
    return ((patches(pixels) - mean) @ (basis / basis.square().sum(0))).permute(0, 3, 1, 2), chosen


def assemble(vae: AutoencoderKL) -> StableDiffusionPipeline:
    """Returns a pipeline of `vae`, an untrained U-Net of 2.2M parameters and an untrained CLIP text encoder."""
    unet = UNet2DConditionModel(
        sample_size=SIZE // 2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        block_out_channels=(48, 96),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=4,  # the number of heads, despite the name
        norm_num_groups=8,
    )
    return stable_diffusion(vae, unet, word_tokenizer(CAPTIONS, TOKENS), prediction_type="v_prediction")


def _pretrain(pipeline: StableDiffusionPipeline, draw: Draw, steps: int, generator: torch.Generator) -> None:
    """Trains on new renderings at each step, and leaves the running average of the weights in the pipeline."""
    unet, text_encoder = pipeline.unet, pipeline.text_encoder
    tokens = caption_tokens(pipeline.tokenizer, [*CAPTIONS, ""])
    parameters = [*unet.parameters(), *text_encoder.parameters()]

    def loss() -> Tensor:
        latents, chosen = draw(generator)
        chosen[torch.rand(BATCH, generator=generator) < UNPROMPTED] = len(CAPTIONS)
        return denoising_loss(pipeline, latents, text_encoder(tokens[chosen])[0], generator)

    unet.train()
    optimizer_steps(
        parameters,
        loss,
        steps,
        learning_rate=LEARNING_RATE,
        averaged=lambda _: 1 - AVERAGED,
        betas=(0.9, 0.99),
        weight_decay=1e-2,
    )
    unet.eval()


if __name__ == "__main__":
    main()
