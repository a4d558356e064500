"""Diffusion pipelines with a few thousand weights: real diffusers classes, built in code from a seed."""

import string
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from peft import LoraConfig
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
)

SIZE = 8  # latents are 4 x 8 x 8, images 3 x 16 x 16
TEXT_LENGTH = 16
WIDTH = 16
END = "</w>"  # CLIP's mark of a word's last character
SPECIAL = ("<|startoftext|>", "<|endoftext|>")
CHARACTERS = string.ascii_lowercase + string.digits + ".,"
VOCABULARY = {token: i for i, token in enumerate([*CHARACTERS, *(c + END for c in CHARACTERS), *SPECIAL])}


@contextmanager
def from_seed(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def tokenizer() -> CLIPTokenizer:
    """Returns CLIP's tokenizer without merges: one token per character."""
    return CLIPTokenizer(vocab=VOCABULARY, merges=[], model_max_length=TEXT_LENGTH)


def text_encoder(projection: int | None = None) -> Any:
    config = CLIPTextConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TEXT_LENGTH,
        bos_token_id=VOCABULARY[SPECIAL[0]],
        eos_token_id=VOCABULARY[SPECIAL[1]],
        pad_token_id=VOCABULARY[SPECIAL[1]],
        projection_dim=projection or WIDTH,
    )
    encoder = CLIPTextModel(config) if projection is None else CLIPTextModelWithProjection(config)
    with torch.no_grad():  # CLIP's own 0.02 makes all prompts nearly equal
        for name, weight in encoder.named_parameters():
            if "embedding" in name:
                weight.mul_(20)
    return encoder


def save_clip(folder: Path, sizes: dict[str, int]) -> None:
    """Saves a half-precision CLIP, as many are stored, with its tokenizer and image processor.

    Args:
        folder: folder to save to.
        sizes: sizes of both encoders, and `image_size`.
    """
    start, end = (VOCABULARY[token] for token in SPECIAL)
    tokens = {"vocab_size": len(VOCABULARY), "bos_token_id": start, "eos_token_id": end, "pad_token_id": end}
    image_size = sizes["image_size"]
    config = CLIPConfig(
        text_config={**sizes, **tokens, "max_position_embeddings": TEXT_LENGTH, "initializer_factor": 15.0},
        vision_config={**sizes, "patch_size": 4, "initializer_factor": 3.0},
        projection_dim=10,
    )
    with from_seed(0):
        CLIPModel(config).half().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": image_size}, crop_size=image_size).save_pretrained(folder)


def vae(channels: int = 4, **settings: Any) -> AutoencoderKL:
    """Returns a VAE that halves the image once."""
    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=2 * SIZE,
        **settings,
    )


def unet(**settings: Any) -> UNet2DConditionModel:
    sizes = {
        "sample_size": SIZE,
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "mid_block_type": "UNetMidBlock2DCrossAttn",
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": WIDTH,
        "attention_head_dim": 4,
    }
    return heard(UNet2DConditionModel(**sizes | settings))


def heard(denoiser: Any) -> Any:
    """Makes the text at least as loud as the image; an untrained denoiser nearly ignores it."""
    with torch.no_grad():
        for name, weight in denoiser.named_parameters():
            if ".attn2.to_" in name or "add_embedding" in name:
                weight.mul_(4)
    return denoiser


def ddim(**settings: Any) -> DDIMScheduler:
    """Returns DDIM with Stable Diffusion's settings."""
    sizes = {
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "steps_offset": 1,
        "set_alpha_to_one": False,
        "clip_sample": False,
        "timestep_spacing": "leading",
    }
    return DDIMScheduler(**sizes | settings)


def quiet(pipeline: Any, dtype: torch.dtype) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline if dtype == torch.float32 else pipeline.to(dtype=dtype)


def stable_diffusion(
    prediction_type: str = "epsilon", dtype: torch.dtype = torch.float32, scheduler: Any = None, seed: int = 0
) -> StableDiffusionPipeline:
    with from_seed(seed):
        pipeline = StableDiffusionPipeline(
            vae=vae(),
            text_encoder=text_encoder(),
            tokenizer=tokenizer(),
            unet=unet(),
            scheduler=scheduler or ddim(prediction_type=prediction_type),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    return quiet(pipeline, dtype)


def stable_diffusion_xl(
    dtype: torch.dtype = torch.float32, scheduler: Any = None, seed: int = 0
) -> StableDiffusionXLPipeline:
    """Two text encoders with concatenated states; added conditions are a pooled state and six sizes."""
    with from_seed(seed):
        pipeline = StableDiffusionXLPipeline(
            vae=vae(),
            text_encoder=text_encoder(),
            text_encoder_2=text_encoder(projection=WIDTH),
            tokenizer=tokenizer(),
            tokenizer_2=tokenizer(),
            scheduler=scheduler or ddim(),
            add_watermarker=False,
            unet=unet(
                cross_attention_dim=2 * WIDTH,
                addition_embed_type="text_time",
                addition_time_embed_dim=4,
                projection_class_embeddings_input_dim=WIDTH + 6 * 4,
            ),
        )
    return quiet(pipeline, dtype)


def stable_diffusion_3(
    dtype: torch.dtype = torch.float32, scheduler: Any = None, seed: int = 0
) -> StableDiffusion3Pipeline:
    """A flow with two CLIP text encoders and no T5, which the pipeline replaces by zeros."""
    with from_seed(seed):
        transformer = SD3Transformer2DModel(
            sample_size=SIZE,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=2 * WIDTH,
            caption_projection_dim=16,
            pooled_projection_dim=2 * WIDTH,
            pos_embed_max_size=SIZE,
            qk_norm="rms_norm",
        )
        pipeline = StableDiffusion3Pipeline(
            transformer=transformer,
            vae=vae(use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06),
            text_encoder=text_encoder(projection=WIDTH),
            tokenizer=tokenizer(),
            text_encoder_2=text_encoder(projection=WIDTH),
            tokenizer_2=tokenizer(),
            text_encoder_3=None,
            tokenizer_3=None,
            scheduler=scheduler or FlowMatchEulerDiscreteScheduler(shift=3.0),
        )
    return quiet(pipeline, dtype)


def controlnet(
    dtype: torch.dtype = torch.float32, scheduler: Any = None, seed: int = 0
) -> tuple[StableDiffusionControlNetPipeline, torch.Tensor]:
    """Returns the pipeline, and an image [1, 3, H, W] in [0, 1] that controls it."""
    with from_seed(seed):
        denoiser = unet()
        control = ControlNetModel.from_unet(denoiser, conditioning_embedding_out_channels=(8, 8))
        with torch.no_grad():  # a new ControlNet ends in zeros, and would control nothing
            for weight in (*control.controlnet_down_blocks.parameters(), *control.controlnet_mid_block.parameters()):
                weight.normal_(std=0.3)
            control.controlnet_cond_embedding.conv_out.weight.normal_(std=0.3)
        pipeline = StableDiffusionControlNetPipeline(
            vae=vae(),
            text_encoder=text_encoder(),
            tokenizer=tokenizer(),
            unet=denoiser,
            controlnet=control,
            scheduler=scheduler or ddim(),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
        image = torch.rand(1, 3, 2 * SIZE, 2 * SIZE)
    return quiet(pipeline, dtype), image


def with_trained_adapters(pipeline: Any) -> Any:
    """Adds adapters that change the unet, as `load_lora_weights` does."""
    with from_seed(2):
        pipeline.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    return pipeline


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
