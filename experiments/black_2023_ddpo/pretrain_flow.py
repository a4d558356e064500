"""Pretrains a small Stable Diffusion 3 of coloured shapes: `python -m experiments.black_2023_ddpo.pretrain_flow`."""

from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor

from experiments.black_2023_ddpo.pretrain import LATENT_CHANNELS, TOKENS
from experiments.black_2023_ddpo.shapes import CAPTIONS, SIZE, colour_match, draw, shape_match
from experiments.patch_vae import patch_autoencoder, patches, principal_components
from experiments.small_flow import BATCH, CALL, flow_pipeline, load_flow, pretrain
from experiments.small_pipeline import save_in_half_precision, word_tokenizer

SHIPPED = Path(__file__).with_name("flow")
STEPS = 800


def pretrained_flow(steps: int, *, seed: int = 0) -> StableDiffusion3Pipeline:
    """Fits a pipeline to synthetic images: sets the VAE by PCA, and trains transformer and text encoder."""
    generator = torch.Generator().manual_seed(seed)
    images = 2 * draw(torch.randint(len(CAPTIONS), (4096,), generator=generator), generator) - 1
    mean, basis = principal_components(images, LATENT_CHANNELS)
    analysis = basis / basis.square().sum(0)

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = torch.randint(len(CAPTIONS), (BATCH,), generator=generator)
        pixels = 2 * draw(chosen, generator) - 1
        return ((patches(pixels) - mean) @ analysis).permute(0, 3, 1, 2), chosen

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = patch_autoencoder(mean, basis)
        pipeline = flow_pipeline(vae, word_tokenizer(CAPTIONS, TOKENS), size=SIZE // 2, patch=2, layers=4, width=96)
        pretrain(pipeline, batch, CAPTIONS, steps, generator)
    return pipeline


def recognised(pipeline: StableDiffusion3Pipeline, *, steps: int = 20, seed: int = 1) -> tuple[float, float]:
    """Returns the shares of pictures with the prompted colour and with the prompted shape, of four of each caption."""
    captions = list(CAPTIONS) * 4
    images = pipeline(
        captions,
        num_inference_steps=steps,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(seed),
        output_type="pt",
        **CALL,
    ).images
    return float(colour_match(images, captions).mean()), float(shape_match(images, captions).mean())


def main() -> None:
    """Pretrains at the default size and writes the pipeline next to this file, with weights in half precision."""
    pipeline = pretrained_flow(STEPS)
    save_in_half_precision(pipeline, pipeline.transformer, SHIPPED)
    print("recognised: colour {:.3f}, shape {:.3f}".format(*recognised(load_flow(SHIPPED))))


if __name__ == "__main__":
    main()
