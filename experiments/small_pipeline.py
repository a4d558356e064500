"""Small text-to-image pipelines that the experiments pretrain: their parts, and their loss."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiffusionPipeline, StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from trimtab_common.tracking import progress

START, END = "<|startoftext|>", "<|endoftext|>"


def stable_diffusion(
    vae: AutoencoderKL, unet: UNet2DConditionModel, tokenizer: CLIPTokenizer, **scheduler: Any
) -> StableDiffusionPipeline:
    """Returns a pipeline of these parts, an untrained CLIP text encoder of two layers, and Stable Diffusion's schedule.

    Args:
        vae: The autoencoder.
        unet: Its cross-attention width is the text encoder's width.
        tokenizer: Its `model_max_length` is the text encoder's.
        scheduler: Further arguments of DDIMScheduler.
    """
    text = text_config(tokenizer, unet.config["cross_attention_dim"])
    # Leading steps with an offset of one, as in Stable Diffusion: the last step has noise too, so it can be trained.
    ddim = DDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.012,
        steps_offset=1,
        set_alpha_to_one=False,
        clip_sample=False,
        timestep_spacing="leading",
        **scheduler,
    )
    return StableDiffusionPipeline(
        vae=vae,
        text_encoder=CLIPTextModel(text).eval(),
        tokenizer=tokenizer,
        unet=unet.eval(),
        scheduler=ddim,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def text_config(tokenizer: CLIPTokenizer, width: int, **settings: Any) -> CLIPTextConfig:
    """Returns the configuration of a CLIP text encoder of two layers.

    Args:
        tokenizer: Its `model_max_length` is the encoder's.
        width: Of the encoder's states.
        settings: Further arguments of CLIPTextConfig.
    """
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **settings,
    )


def save_in_half_precision(pipeline: DiffusionPipeline, denoiser: nn.Module, folder: Path) -> None:
    """Writes a pipeline with its denoiser's weights in float16; the text encoder's are rounded to it."""
    pipeline.text_encoder.half().float()  # rounds, and stores float32: transformers keeps the stored precision
    denoiser.half()
    pipeline.save_pretrained(folder)


def optimizer_steps(
    parameters: Sequence[Tensor],
    loss: Callable[[], Tensor],
    steps: int,
    *,
    learning_rate: float,
    averaged: Callable[[int], float] | None = None,
    **adamw: Any,
) -> None:
    """Takes steps of AdamW at a rate that rises and falls once (OneCycleLR), with gradients of norm 1 at most.

    Args:
        parameters: The weights that train.
        loss: Draws a batch, and returns its loss.
        steps: How many.
        learning_rate: The largest rate.
        averaged: The share of a step's weights, from its number, in a running average, which the parameters are set to
            at the end. None: no average.
        adamw: Further arguments of AdamW.
    """
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, **adamw)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.05)
    averages = [parameter.detach().clone() for parameter in parameters]
    for step in progress(steps, "pretraining"):
        loss().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if averaged is not None:
            torch._foreach_lerp_(averages, [parameter.detach() for parameter in parameters], averaged(step))
    if averaged is not None:
        for parameter, average in zip(parameters, averages, strict=True):
            parameter.data.copy_(average)


def caption_tokens(tokenizer: CLIPTokenizer, captions: Sequence[str]) -> Tensor:
    """Returns the tokens of captions, [B, L], padded to the tokenizer's longest text."""
    texts = list(captions)
    length = tokenizer.model_max_length
    return tokenizer(texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids


def denoising_loss(
    pipeline: StableDiffusionPipeline, latents: Tensor, context: Tensor, generator: torch.Generator
) -> Tensor:
    """Mean squared error of what the U-Net predicts for random noise at random timesteps: the noise, or v.

    v = sqrt(alpha_bar) noise - sqrt(1 - alpha_bar) latents (Salimans & Ho 2022, arXiv:2202.00512, section 4).

    Args:
        pipeline: Its scheduler determines what is predicted.
        latents: Of images, [B, C, H, W].
        context: The text encoder's states, [B, L, width].
        generator: Draws noise and timesteps.
    """
    scheduler = pipeline.scheduler
    noise = torch.randn(latents.shape, generator=generator)
    timesteps = torch.randint(scheduler.config.num_train_timesteps, (len(latents),), generator=generator)
    is_v = scheduler.config.prediction_type == "v_prediction"
    target = scheduler.get_velocity(latents, noise, timesteps) if is_v else noise
    noisy = scheduler.add_noise(latents, noise, timesteps)
    return F.mse_loss(pipeline.unet(noisy, timesteps, context).sample, target)


def word_tokenizer(captions: Sequence[str], max_length: int) -> CLIPTokenizer:
    """Returns CLIP's byte-pair encoding of lower-case letters, with a token for each word of the captions."""
    letters = [*string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase)]
    merges: list[tuple[str, str]] = []
    for word in dict.fromkeys(" ".join(captions).split()):
        pieces = [*word[:-1], f"{word[-1]}</w>"]
        for merge in merges:
            pieces = _merged(pieces, merge)
        while len(pieces) > 1:
            merges.append((pieces[0], pieces[1]))
            pieces = _merged(pieces, merges[-1])
    tokens = dict.fromkeys([START, END, *letters, *("".join(merge) for merge in merges)])
    return CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, model_max_length=max_length)


def _merged(pieces: list[str], merge: tuple[str, str]) -> list[str]:
    done: list[str] = []
    for piece in pieces:
        if done and (done[-1], piece) == merge:
            done[-1] += piece
        else:
            done.append(piece)
    return done
