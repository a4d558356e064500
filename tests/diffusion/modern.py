"""Flux, Qwen-Image and Wan with a few thousand weights: real classes of diffusers and transformers, built in code."""

from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from tests.diffusion import tiny
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

T5_VOCABULARY = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *(("▁" + c, -1.0) for c in tiny.CHARACTERS)]
T5_VOCABULARY += [(c, -1.0) for c in tiny.CHARACTERS]
BYTES = {character: number for number, character in enumerate(sorted(ByteLevel.alphabet()))}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
SPECIAL += ["<|video_pad|>"]


def t5(kind: Any = T5EncoderModel, config: Any = T5Config) -> tuple[T5Tokenizer, Any]:
    """Returns a tokenizer with one token per character, and an encoder that gives words different states."""
    tokenizer = T5Tokenizer(vocab=T5_VOCABULARY, extra_ids=0)
    encoder = kind(
        config(
            vocab_size=len(tokenizer),
            d_model=tiny.WIDTH,
            d_kv=8,
            d_ff=24,
            num_layers=1,
            num_heads=2,
            feed_forward_proj="gated-gelu",
        )
    )
    return tokenizer, encoder.eval()


def flux(embeds_guidance: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0) -> FluxPipeline:
    """Packed latents [B, 16, 16]; embedded guidance as in Flux dev, or none as in schnell."""
    with tiny.from_seed(seed):
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=tiny.WIDTH,
            pooled_projection_dim=tiny.WIDTH,
            guidance_embeds=embeds_guidance,
            axes_dims_rope=(2, 2, 4),
        )
        tokenizer_2, text_encoder_2 = t5()
        pipeline = FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            vae=tiny.vae(use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06),
            text_encoder=tiny.text_encoder(),
            tokenizer=tiny.tokenizer(),
            text_encoder_2=text_encoder_2,
            tokenizer_2=tokenizer_2,
            transformer=transformer,
        )
    return tiny.quiet(pipeline, dtype)


def qwen_image(dtype: torch.dtype = torch.float32, seed: int = 0) -> QwenImagePipeline:
    """Prompt-length texts with masks; guidance takes two calls and keeps the norm of each token."""
    vocabulary = BYTES | {token: len(BYTES) + number for number, token in enumerate(SPECIAL)}
    with tiny.from_seed(seed):
        text = {
            "hidden_size": tiny.WIDTH,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": len(vocabulary),
            "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        }
        vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": tiny.WIDTH}
        ids = {"image_token_id": vocabulary["<|image_pad|>"], "video_token_id": vocabulary["<|video_pad|>"]}
        ids |= {"vision_start_token_id": vocabulary["<|vision_start|>"]}
        pipeline = QwenImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            vae=AutoencoderKLQwenImage(
                base_dim=8,
                z_dim=4,
                dim_mult=[1, 1],
                num_res_blocks=1,
                temperal_downsample=[False],
                latents_mean=[0.0] * 4,
                latents_std=[1.0] * 4,
            ),
            text_encoder=Qwen2_5_VLForConditionalGeneration(
                Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
            ).eval(),
            tokenizer=Qwen2Tokenizer(vocab=vocabulary, merges=[]),
            transformer=QwenImageTransformer2DModel(
                patch_size=2,
                in_channels=16,
                out_channels=4,
                num_layers=1,
                attention_head_dim=8,
                num_attention_heads=2,
                joint_attention_dim=tiny.WIDTH,
                axes_dims_rope=(2, 2, 4),
            ),
        )
    return tiny.quiet(pipeline, dtype)


def wan(dtype: torch.dtype = torch.float32, seed: int = 0) -> WanPipeline:
    """Float32 latents [B, 4, F, H, W] for any denoiser; guidance takes two calls; UniPC, as on the hub."""
    with tiny.from_seed(seed):
        tokenizer, text_encoder = t5(UMT5EncoderModel, UMT5Config)
        pipeline = WanPipeline(
            tokenizer=tokenizer,
            text_encoder=text_encoder,
            vae=AutoencoderKLWan(
                base_dim=8,
                z_dim=4,
                dim_mult=[1, 1],
                num_res_blocks=1,
                temperal_downsample=[True],
                latents_mean=[0.0] * 4,
                latents_std=[1.0] * 4,
                scale_factor_spatial=2,
                scale_factor_temporal=2,
            ),
            scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
            transformer=WanTransformer3DModel(
                patch_size=(1, 2, 2),
                num_attention_heads=2,
                attention_head_dim=12,
                in_channels=4,
                out_channels=4,
                text_dim=tiny.WIDTH,
                freq_dim=16,
                ffn_dim=24,
                num_layers=1,
                rope_max_seq_len=32,
            ),
        )
    return tiny.quiet(pipeline, dtype)
