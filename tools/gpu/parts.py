"""The parts: each trains for a few steps, and returns its measurements."""

import importlib.util
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tools.gpu.models import STORIES, Size, llama, preferences, prompts, scorer, stable_diffusion, token_rows, tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TrainerCallback

from experiments.assets.models import smollm2_135m_instruct
from trimtab_diffusion import DDPOConfig, DDPOStableDiffusionPipeline, DDPOTrainer
from trimtab_diffusion.rewards import jpeg_incompressibility
from trimtab_lm import (
    AutoModelForCausalLMWithValueHead,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    IterativeSFTConfig,
    IterativeSFTTrainer,
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

ROOT = Path(__file__).parents[2]
TESTS = {"TESTS_ON_GPU": "1", "OMP_NUM_THREADS": "1"}  # tests/conftest.py hides the GPU from all other tests
FILES = ("tests/accelerator", "tests/common/test_seeding.py")
Figures = dict[str, float]


@dataclass(frozen=True)
class Part:
    """Work that takes less than eight minutes on one GPU.

    Attributes:
        what: description of the work in one line, for the record.
        run: function that trains, and returns figures for the record; the caller times it.
        packages: other packages that must be installed.
        needs_gpu: whether the part cannot run on a CPU.
    """

    what: str
    run: Callable[[Size], Figures]
    packages: tuple[str, ...] = ()
    needs_gpu: bool = False

    def missing(self, size: Size) -> str | None:
        """Returns why the part cannot run here; None if it can."""
        if absent := [name for name in self.packages if importlib.util.find_spec(name) is None]:
            return f"{', '.join(absent)} is not installed"
        return "it needs a GPU" if self.needs_gpu and size.device == "cpu" else None


class Losses(TrainerCallback):
    """Keeps the losses that a Trainer logs."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            self.values.append(logs["loss"])


def trainer_settings(size: Size, **settings: Any) -> dict[str, Any]:
    """Returns the settings that the configs of the Trainer family share: bfloat16, and recomputed activations."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": size.steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-5,
        "logging_steps": 1,
        "bf16": True,
        "gradient_checkpointing": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": size.device == "cpu",
    } | settings


def train(trainer: Any) -> Figures:
    """Trains, and returns the first and last loss; both must be finite."""
    losses = Losses()
    trainer.add_callback(losses)
    trainer.train()
    return finite({"first loss": losses.values[0], "last loss": losses.values[-1]})


def finite(figures: Figures) -> Figures:
    """Returns the figures.

    Raises:
        ArithmeticError: one of them is not finite.
    """
    if bad := [name for name, value in figures.items() if not math.isfinite(value)]:
        raise ArithmeticError(f"{', '.join(bad)} is not finite: {figures}")
    return figures


def tests(_: Size) -> Figures:
    """The tests that other machines run on the pretend accelerator, eight at a time; returns how many passed.

    Raises:
        RuntimeError: one of them failed.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-n", "8", "-m", "accelerator or gpu", *FILES]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | TESTS, capture_output=True, text=True)
    if done.returncode:
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        raise RuntimeError("; ".join([*failed, done.stdout.strip().splitlines()[-1]]))
    return {name: float(number) for number, name in re.findall(r"(\d+) (passed|skipped)", done.stdout)}


# Trainers at about 1B parameters -------------------------------------------------------------------------------------


def sft(size: Size, model: dict[str, Any] | None = None, peft: LoraConfig | None = None, **config: Any) -> Figures:
    """SFT on rows with 1,024 tokens."""
    args = SFTConfig(**trainer_settings(size, max_length=size.tokens, **config))
    rows = token_rows(size, args.per_device_train_batch_size * size.steps)
    policy = llama(size, **model or {})
    return train(SFTTrainer(policy, args, train_dataset=rows, processing_class=tokenizer(), peft_config=peft))


def reward(size: Size) -> Figures:
    """A reward model on pairs with 512 words."""
    args = RewardConfig(**trainer_settings(size, max_length=size.tokens))
    rows = preferences(size, args.per_device_train_batch_size * size.steps)
    return train(RewardTrainer(scorer(size), args, train_dataset=rows, processing_class=tokenizer()))


def dpo(size: Size) -> Figures:
    """DPO on pairs with 512 words and a copied reference."""
    args = DPOConfig(**trainer_settings(size, max_length=size.tokens))
    rows = preferences(size, args.per_device_train_batch_size * size.steps)
    return train(DPOTrainer(llama(size), args=args, train_dataset=rows, processing_class=tokenizer()))


def length(completions: Sequence[str], **_: object) -> list[float]:
    """Rewards long texts; this costs no time."""
    return [len(text) / 100 for text in completions]


def grpo(size: Size, model: Any = None, words: Any = None, **config: Any) -> Figures:
    """GRPO with 4 prompts x 8 completions a step."""
    settings = {"num_generations": 8, "max_completion_length": size.new_tokens, "beta": 0.01}
    args = GRPOConfig(**trainer_settings(size, **settings | config))
    rows = Dataset.from_dict({"prompt": prompts(args.per_device_train_batch_size * size.steps)})
    words = words or tokenizer()
    return train(
        GRPOTrainer(model or llama(size), length, args, rows, processing_class=words),
    )


def smollm2(size: Size) -> Figures:
    """GRPO of SmolLM2-135M-Instruct on English text; at the smallest size, of the examples' model."""
    folder = STORIES if size.is_small else smollm2_135m_instruct()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(size.device)
    words = AutoTokenizer.from_pretrained(folder)
    words.pad_token = words.pad_token or words.eos_token
    return grpo(size, model, words)


def ppo(size: Size, separate_critic: bool = False, **generation: Any) -> Figures:
    """PPO with a value head or a separate critic, 16 responses a step."""
    config = PPOConfig(
        steps=size.steps,
        batch_size=16,
        mini_batch_size=4,
        ppo_epochs=2,
        accelerator_kwargs={"mixed_precision": "bf16", "cpu": size.device == "cpu"},
    )
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(llama(size))
    critic = scorer(size) if separate_critic else None
    rows = Dataset.from_dict({"query": prompts(32)})
    trainer = PPOTrainer(config, policy, tokenizer=tokenizer(), dataset=rows, value_model=critic)
    history = trainer.train(
        lambda queries, responses, **_: length(responses),
        generation_kwargs={"max_new_tokens": size.new_tokens} | generation,
    )
    names = {"ppo/loss/total": "last loss", "objective/kl": "KL, nats"}
    return finite({label: history[-1][name] for name, label in names.items()})


def iterative_sft(size: Size) -> Figures:
    """IterativeSFT in its `step` mode."""
    args = IterativeSFTConfig(**trainer_settings(size, max_length=size.tokens))
    trainer = IterativeSFTTrainer(llama(size), args, processing_class=tokenizer())
    rows = [torch.tensor(row) for row in token_rows(size, 4 * size.steps)["input_ids"]]
    losses = [trainer.step(input_ids=rows[start : start + 4])["loss"] for start in range(0, len(rows), 4)]
    return finite({"first loss": float(losses[0]), "last loss": float(losses[-1])})


def ddpo(size: Size, precision: str, use_lora: bool, **settings: Any) -> Figures:
    """DDPO of a Stable Diffusion with the sizes of version 1.5."""
    config = DDPOConfig(
        num_epochs=2,
        log_with=None,
        logdir=tempfile.mkdtemp(),
        save_freq=10**6,
        mixed_precision="no" if size.device == "cpu" and precision == "fp16" else precision,
        sample_num_steps=3 if size.is_small else 10,
        sample_batch_size=2,
        sample_num_batches_per_epoch=2,
        train_batch_size=2,
        sample_guidance_scale=5.0,
        accelerator_kwargs={"cpu": size.device == "cpu"},
        **settings,
    )
    pipeline = DDPOStableDiffusionPipeline(stable_diffusion(size), use_lora=use_lora)
    trainer = DDPOTrainer(config, jpeg_incompressibility, lambda: ("a cat", {}), pipeline)
    updates = 0
    for epoch in range(config.num_epochs):
        updates = trainer.step(epoch, updates)
    return finite({"updates": updates, "reward, kB": trainer.last_stats["reward_mean"]})


# Kernels, quantization, engines --------------------------------------------------------------------------------------


def quantized(size: Size, bits: int) -> Figures:
    """SFT of adapters on a base model that bitsandbytes keeps in 8 or 4 bits."""
    names = {8: {"load_in_8bit": True}, 4: {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16}}
    with tempfile.TemporaryDirectory() as folder:
        llama(size, torch.bfloat16).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=BitsAndBytesConfig(**names[bits]), device_map=size.device
        )
    args = SFTConfig(**trainer_settings(size, max_length=size.tokens))
    rows = token_rows(size, args.per_device_train_batch_size * size.steps)
    adapters = LoraConfig(r=8, target_modules="all-linear")
    return train(SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer(), peft_config=adapters))


def vllm(size: Size) -> Figures:
    """GRPO that samples with a vLLM engine in this process."""
    with tempfile.TemporaryDirectory() as folder:
        llama(size, torch.bfloat16).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        options = {"model": str(Path(folder)), "gpu_memory_utilization": 0.3, "enforce_eager": size.is_small}
        return grpo(size, rollout_backend="vllm", rollout_backend_kwargs=options)


FLASH = {"attn_implementation": "flash_attention_2"}
PARTS = {
    "tests": Part(
        "every trainer and pipeline, small: two steps are a step, a save, a resume and another, to the same bits",
        tests,
        needs_gpu=True,
    ),
    "sft": Part("SFT, 4 rows of 1,024 tokens, whole model", sft),
    "sft_lora": Part("the same with LoRA", partial(sft, peft=LoraConfig(r=8, target_modules="all-linear"))),
    "reward": Part("Reward, 4 pairs of 512 words", reward),
    "dpo": Part("DPO, 4 pairs of 512 words, copied reference", dpo),
    "grpo": Part("GRPO, 4 prompts of 8 completions of 128 tokens", grpo),
    "grpo_smollm2": Part("GRPO of SmolLM2-135M-Instruct on real text", smollm2),
    "grpo_batching": Part("GRPO with continuous batching", partial(grpo, rollout_backend="continuous_batching")),
    "ppo": Part("PPO with a value head, 16 responses of 128 tokens", ppo),
    "ppo_critic": Part("PPO with a separate critic of 1B", partial(ppo, separate_critic=True)),
    "ppo_static": Part("PPO that decodes with a static cache, compiled", partial(ppo, cache_implementation="static")),
    "iterative_sft": Part("IterativeSFT, 4 rows of 1,024 tokens", iterative_sft),
    "ddpo_fp16": Part("DDPO in fp16 with a gradient scaler, LoRA", partial(ddpo, precision="fp16", use_lora=True)),
    "ddpo_bf16": Part("DDPO in bf16, whole U-Net", partial(ddpo, precision="bf16", use_lora=False)),
    "flash": Part("SFT with FlashAttention 2", partial(sft, model=FLASH), ("flash_attn",), needs_gpu=True),
    "ddpo_compile": Part(
        "DDPO in bf16, blocks of the U-Net compiled, LoRA",
        partial(ddpo, precision="bf16", use_lora=True, train_compile="inductor"),
    ),
    "compile": Part("SFT with torch.compile", partial(sft, torch_compile=True, gradient_checkpointing=False)),
    "liger": Part("SFT with Liger's kernels", partial(sft, use_liger_kernel=True), ("liger_kernel",), needs_gpu=True),
    "bits_8": Part("LoRA on an 8-bit base", partial(quantized, bits=8), ("bitsandbytes",), needs_gpu=True),
    "bits_4": Part("LoRA on a 4-bit base", partial(quantized, bits=4), ("bitsandbytes",), needs_gpu=True),
    "vllm": Part("GRPO with vLLM in the process", vllm, ("vllm",), needs_gpu=True),
}
