"""A small StableDiffusion3Pipeline: a flow-matching transformer, pretrained on latents with captions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPTextModelWithProjection, CLIPTokenizer

from experiments.small_pipeline import caption_tokens, optimizer_steps, text_config

TEXT_WIDTH, HEAD = 32, 32
BATCH, LEARNING_RATE, UNPROMPTED, EMA = 64, 2e-3, 0.1, 0.995
CALL = {"max_sequence_length": 0}
"""Arguments of every call: without a T5 the pipeline puts zeros in its place, so many of them; 256 by default."""
Draw = Callable[[torch.Generator], tuple[Tensor, Tensor]]
"""Draws latents [B, C, h, w] and the number of each one's caption [B]."""


def flow_pipeline(
    vae: Any, tokenizer: CLIPTokenizer, *, size: int, patch: int, layers: int, width: int
) -> StableDiffusion3Pipeline:
    """Returns a pipeline of a VAE with an untrained transformer and an untrained text encoder, which serves twice.

    Args:
        vae: its latents have a mean of 0 and a mean square of about 1.
        tokenizer: of the captions.
        size: the latents' height and width.
        patch: side of the square of latents that makes a token.
        layers: blocks of the transformer.
        width: channels of the transformer, a multiple of 32.
    """
    text = text_config(tokenizer, TEXT_WIDTH, projection_dim=TEXT_WIDTH)
    transformer = SD3Transformer2DModel(
        sample_size=size,
        patch_size=patch,
        in_channels=vae.config.latent_channels,
        out_channels=vae.config.latent_channels,
        num_layers=layers,
        attention_head_dim=HEAD,
        num_attention_heads=width // HEAD,
        caption_projection_dim=width,
        joint_attention_dim=2 * TEXT_WIDTH,
        pooled_projection_dim=2 * TEXT_WIDTH,
        pos_embed_max_size=size // patch,
        qk_norm="rms_norm",
    )
    encoder = CLIPTextModelWithProjection(text).eval()
    vae.register_to_config(shift_factor=vae.config.shift_factor or 0.0)  # the pipeline adds it to latents
    return StableDiffusion3Pipeline(
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae,
        text_encoder=encoder,
        tokenizer=tokenizer,
        text_encoder_2=encoder,
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
    )


def pretrain(
    pipeline: StableDiffusion3Pipeline, draw: Draw, captions: Sequence[str], steps: int, generator: torch.Generator
) -> None:
    """Trains transformer and text encoder by flow matching: at x_t = (1 - t) x + t noise they predict noise - x.

    Lipman et al. 2022, arXiv:2210.02747; t is logit-normal (Esser et al. 2024, arXiv:2403.03206, Eq. 19). The weights
    are exponential means over the steps.

    Args:
        pipeline: untrained.
        draw: draws a batch.
        captions: by number.
        steps: optimizer steps of a batch.
        generator: determines what is random.
    """
    transformer, encoder = pipeline.transformer, pipeline.text_encoder
    tokens = caption_tokens(pipeline.tokenizer, [*captions, ""])

    def loss() -> Tensor:
        latents, chosen = draw(generator)
        count = len(latents)
        chosen = torch.where(torch.rand(count, generator=generator) < UNPROMPTED, len(captions), chosen)
        time = torch.randn(count, generator=generator).sigmoid()
        noise = torch.randn(latents.shape, generator=generator)
        t = time.view(-1, 1, 1, 1)
        text = encoder(tokens[chosen], output_hidden_states=True)
        velocity = transformer(
            (1 - t) * latents + t * noise,
            timestep=1000 * time,
            encoder_hidden_states=torch.cat([text.hidden_states[-2]] * 2, dim=2),
            pooled_projections=torch.cat([text.text_embeds] * 2, dim=1),
        ).sample
        return F.mse_loss(velocity, noise - latents)

    transformer.train()
    optimizer_steps(
        [*transformer.parameters(), *encoder.parameters()],
        loss,
        steps,
        learning_rate=LEARNING_RATE,
        averaged=lambda step: max(1 - EMA, 9 / (10 + step)),  # at first a shorter mean, which forgets the random start
        betas=(0.9, 0.99),
        weight_decay=1e-2,
    )
    transformer.eval()


def equal_steps(count: int) -> dict[str, Any]:
    """Returns the arguments of a call with so many equal steps; by default the last one begins at t = 0.001."""
    return CALL | {"num_inference_steps": count, "sigmas": [1 - i / count for i in range(count)]}


def load_flow(folder: str | Path) -> StableDiffusion3Pipeline:
    """Loads a saved pipeline; diffusers does not store that it has no third text encoder."""
    return StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)
