"""What the pages' code needs: tiny models with the hub's names, and settings that finish within seconds."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tests.diffusion import tiny as tiny_diffusion
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from trimtab_diffusion import AlignPropConfig, DDPOConfig, DiffusionDPOConfig, DiffusionNFTConfig
from trimtab_diffusion.rewards import CLIP, AestheticHead
from trimtab_lm import GRPOConfig, PPOConfig
from trimtab_lm.hf.config import TrainerConfig

STORIES = Path(__file__).resolve().parents[2] / "examples" / "stories"
CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}assistant:"
LANGUAGE_MODELS = ("gpt2", "Qwen/Qwen3-0.6B")
QUANTIZED = "my-sft-model"
REWARD_MODELS = ("my-reward-model",)
PIPELINES = {
    "stable-diffusion-v1-5/stable-diffusion-v1-5": tiny_diffusion.stable_diffusion,
    "stabilityai/stable-diffusion-3.5-medium": tiny_diffusion.stable_diffusion_3,
}
AT_MOST: dict[type, dict[str, Any]] = {
    TrainerConfig: {"max_steps": 2, "per_device_train_batch_size": 4},
    GRPOConfig: {"max_completion_length": 8},
    PPOConfig: {"steps": 2},
    AlignPropConfig: {"num_epochs": 1, "sample_num_steps": 2, "train_batch_size": 2},
    DiffusionDPOConfig: {"num_epochs": 1, "train_batch_size": 2},
    DiffusionNFTConfig: {
        "num_epochs": 1,
        "sample_num_steps": 2,
        "sample_batch_size": 2,
        "group_size": 2,
        "train_batch_size": 2,
        "train_gradient_accumulation_steps": 2,
    },
    DDPOConfig: {
        "num_epochs": 1,
        "sample_num_steps": 2,
        "sample_window": 1,
        "sample_batch_size": 4,
        "group_size": 2,
        "train_batch_size": 2,
        "train_gradient_accumulation_steps": 2,
    },
}
"""The largest values of settings in the tests; they replace larger ones, and -1 for no limit."""


def fill(folder: Path) -> None:
    """Saves this module's models into a folder, each under its name on the hub."""
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    tokenizer.chat_template = CHAT
    policy = AutoModelForCausalLM.from_pretrained(STORIES)
    scorer = AutoModelForSequenceClassification.from_pretrained(STORIES, num_labels=1)
    scorer.config.pad_token_id = tokenizer.eos_token_id
    # On CPUs with AVX512-BF16, bitsandbytes packs 4-bit weights if their sizes are multiples of 64, and rejects others.
    quantizable = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(STORIES, intermediate_size=384))
    for model, names in ((policy, LANGUAGE_MODELS), (quantizable, (QUANTIZED,)), (scorer, REWARD_MODELS)):
        for name in names:
            model.save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
    for name, make in PIPELINES.items():
        make().save_pretrained(folder / name)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    tiny_diffusion.save_clip(folder / CLIP, {**sizes, "image_size": 12})
    torch.save(AestheticHead(10).state_dict(), folder / "aesthetic.pth")


@contextmanager
def small_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limits the settings of configurations constructed in the block to the values in `AT_MOST`."""
    with monkeypatch.context() as patch:
        for kind, limits in AT_MOST.items():
            patch.setattr(kind, "__post_init__", _limited(kind.__post_init__, limits))
        yield


def _limited(check: Callable[[Any], None], limits: dict[str, Any]) -> Callable[[Any], None]:
    def post_init(config: Any) -> None:
        for name, most in limits.items():
            if not 0 < getattr(config, name) <= most:
                setattr(config, name, most)
        if getattr(config, "mixed_precision", None) == "fp16" and not torch.cuda.is_available():
            config.mixed_precision = "no"
        check(config)

    return post_init


def hidden_names() -> dict[str, Any]:
    """Returns names that READMEs' code uses and that only the text around it explains."""
    prompts = [f"Once there was a {hero}." for hero in ("dog", "cat", "king", "bird") for _ in range(4)]
    return {
        "prompts": prompts,
        "my_reward": lambda text: float(text.count("a")),
        "questions": Dataset.from_dict({"prompt": prompts}),
        "score": lambda completions, **columns: [float(len(text)) for text in completions],
        "pairs": Dataset.from_dict({"prompt": prompts, "chosen": [" It was happy."] * 16, "rejected": [" No."] * 16}),
        "my_image_reward": lambda images, prompts, metadata: images.mean((1, 2, 3)),
        "my_prompts": lambda: (random.choice(["a cat", "a dog"]), {}),
    }
