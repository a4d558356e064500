"""Pretrains a small Stable Diffusion of coloured shapes: `python -m experiments.black_2023_ddpo.pretrain`."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from experiments.assets.registry import build_once, cache_dir
from experiments.black_2023_ddpo.shapes import CAPTIONS, draw
from experiments.black_2023_ddpo.vae import patch_autoencoder, patches, principal_components
from trimtab_common.tracking import progress

START, END = "<|startoftext|>", "<|endoftext|>"
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
    pipeline.text_encoder.half().float()  # rounds, and stores float32: transformers keeps the stored precision
    pipeline.unet.half()
    pipeline.save_pretrained(SHIPPED)


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


def assemble(vae: Any) -> StableDiffusionPipeline:
    """Returns a pipeline of `vae`, an untrained U-Net of 0.8M parameters and an untrained CLIP text encoder."""
    tokenizer = word_tokenizer()
    text = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
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
    # Leading steps with an offset of one, as in Stable Diffusion: the last step has noise too, so it can be trained.
    scheduler = DDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        steps_offset=1,
        set_alpha_to_one=False,
        clip_sample=False,
        timestep_spacing="leading",
    )
    return StableDiffusionPipeline(
        vae=vae,
        text_encoder=CLIPTextModel(text).eval(),
        tokenizer=tokenizer,
        unet=unet.eval(),
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def word_tokenizer() -> CLIPTokenizer:
    """Returns CLIP's byte-pair encoding of lower-case letters, with a token for each word of CAPTIONS."""
    letters = [*string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase)]
    merges: list[tuple[str, str]] = []
    for word in dict.fromkeys(" ".join(CAPTIONS).split()):
        pieces = [*word[:-1], f"{word[-1]}</w>"]
        for merge in merges:
            pieces = _merged(pieces, merge)
        while len(pieces) > 1:
            merges.append((pieces[0], pieces[1]))
            pieces = _merged(pieces, merges[-1])
    tokens = dict.fromkeys([START, END, *letters, *("".join(merge) for merge in merges)])
    return CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, model_max_length=TOKENS)


def _merged(pieces: list[str], merge: tuple[str, str]) -> list[str]:
    done: list[str] = []
    for piece in pieces:
        if done and (done[-1], piece) == merge:
            done[-1] += piece
        else:
            done.append(piece)
    return done


def _pretrain(pipeline: StableDiffusionPipeline, mean: Tensor, basis: Tensor, steps: int, generator: Any) -> None:
    """Trains U-Net and text encoder to predict the noise, on new images at each step."""
    unet, text_encoder, scheduler = pipeline.unet, pipeline.text_encoder, pipeline.scheduler
    captions = pipeline.tokenizer(
        [*CAPTIONS, ""], padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt"
    ).input_ids
    parameters = [*unet.parameters(), *text_encoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.05)
    unet.train()
    for _ in progress(steps, "pretraining"):
        chosen = torch.randint(len(CAPTIONS), (BATCH,), generator=generator)
        pixels = 2 * draw(chosen, generator) - 1
        latents = ((patches(pixels) - mean) @ (basis / basis.square().sum(0))).permute(0, 3, 1, 2)
        chosen[torch.rand(BATCH, generator=generator) < UNPROMPTED] = len(CAPTIONS)
        noise = torch.randn(latents.shape, generator=generator)
        timesteps = torch.randint(scheduler.config.num_train_timesteps, (BATCH,), generator=generator)
        noisy = scheduler.add_noise(latents, noise, timesteps)
        context = text_encoder(captions)[0][chosen]
        loss = F.mse_loss(unet(noisy, timesteps, context).sample, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    unet.eval()


if __name__ == "__main__":
    main()
