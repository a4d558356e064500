"""Builds models, texts and tokenizers for the parts: about 1B parameters on a GPU, a few thousand on a CPU."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import (
    AutoTokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerBase,
)

STORIES = Path(__file__).parents[2] / "examples" / "stories"
# The sizes of Llama 3.2 1B: 1.24 billion parameters with a tied head.
LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": True,
}
LLAMA_SMALL = LLAMA_1B | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 4096,
}
# The sizes of Stable Diffusion 1.5: a U-Net with 860 million parameters and a text encoder with 123 million.
UNET_SD15 = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}
UNET_SMALL = {
    "sample_size": 8,
    "cross_attention_dim": 32,
    "attention_head_dim": 4,
    "block_out_channels": (16, 16, 32, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
}
TEXT_SD15 = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
TEXT_SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


@dataclass(frozen=True)
class Size:
    """The size at which a part runs.

    Attributes:
        device: "cuda" or "cpu".
        is_small: whether to use a few thousand parameters and two steps, to check that a part runs.
    """

    device: str
    is_small: bool

    @property
    def steps(self) -> int:
        """Optimizer steps per part."""
        return 2 if self.is_small else 6

    @property
    def tokens(self) -> int:
        """Tokens per training row."""
        return 32 if self.is_small else 1024

    @property
    def new_tokens(self) -> int:
        """Maximum number of tokens that a policy samples for each prompt."""
        return 8 if self.is_small else 128


def tokenizer() -> PreTrainedTokenizerBase:
    """Returns the tokenizer of the examples' model, which needs no download."""
    words = AutoTokenizer.from_pretrained(STORIES)
    words.pad_token = words.pad_token or words.eos_token
    return words


def llama(size: Size, dtype: torch.dtype = torch.float32, **settings: Any) -> LlamaForCausalLM:
    """Returns a Llama with random weights on the size's device."""
    return _built(LlamaForCausalLM, size, dtype, settings)


def scorer(size: Size, dtype: torch.dtype = torch.float32) -> LlamaForSequenceClassification:
    """Returns a Llama with random weights that gives each text one score."""
    return _built(LlamaForSequenceClassification, size, dtype, {"num_labels": 1})


def _built(kind: Any, size: Size, dtype: torch.dtype, settings: dict[str, Any]) -> Any:
    words = tokenizer()
    special = {name: getattr(words, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(0)
    with torch.device(size.device):
        return kind(LlamaConfig(**(LLAMA_SMALL if size.is_small else LLAMA_1B) | special | settings)).to(dtype)


def token_rows(size: Size, count: int) -> Dataset:
    """Returns rows of random token ids; SFT accepts them as tokenized."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(10, len(tokenizer()), (count, size.tokens), generator=generator)
    return Dataset.from_dict({"input_ids": rows.tolist()})


def preferences(size: Size, count: int) -> Dataset:
    """Returns pairs of answers to a prompt, each about half of `Size.tokens` long."""
    words = ["the", "little", "dog", "went", "home", "and", "saw", "a", "big", "happy", "bird"]
    answers = [" ".join(words[(i + k) % len(words)] for k in range(size.tokens // 2)) for i in range(2 * count)]
    return Dataset.from_dict(
        {
            "prompt": [f"Story number {i}." for i in range(count)],
            "chosen": [" " + text for text in answers[:count]],
            "rejected": [" " + text for text in answers[count:]],
        }
    )


def prompts(count: int) -> list[str]:
    """Returns the openings of stories."""
    heroes, places = ("dog", "boy", "girl", "bear", "cat", "bird", "king", "frog"), ("park", "sea", "woods", "farm")
    return [f"Once there was a {heroes[i % 8]} in the {places[i // 8 % 4]}." for i in range(count)]


def stable_diffusion(size: Size) -> StableDiffusionPipeline:
    """Returns a Stable Diffusion with random weights on the CPU; its tokenizer knows only the alphabet."""
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    tokens = [*alphabet, *(letter + "</w>" for letter in alphabet), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    text = (TEXT_SMALL if size.is_small else TEXT_SD15) | {"vocab_size": 49408, "max_position_embeddings": 77}
    ends = {"bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 1, "pad_token_id": len(tokens) - 1}
    widths = (16, 16, 16, 16) if size.is_small else (128, 256, 512, 512)
    torch.manual_seed(0)
    return StableDiffusionPipeline(
        vae=AutoencoderKL(
            block_out_channels=widths,
            down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
            layers_per_block=1 if size.is_small else 2,
            norm_num_groups=16 if size.is_small else 32,
            sample_size=64 if size.is_small else 512,
        ),
        text_encoder=CLIPTextModel(CLIPTextConfig(**text | ends)),
        tokenizer=CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77),
        unet=UNet2DConditionModel(**UNET_SMALL if size.is_small else UNET_SD15),
        scheduler=DDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            clip_sample=False,
            set_alpha_to_one=False,  # otherwise the last step would have no noise, and no training
            steps_offset=1,
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
