"""Runs every trainer briefly to collect the names of everything that it logs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tests.diffusion import tiny as tiny_diffusion
from tests.lm import tiny
from transformers import TrainerCallback

from trimtab_diffusion import (
    AlignPropConfig,
    AlignPropTrainer,
    DDPOConfig,
    DDPOTrainer,
    DiffusionDPOConfig,
    DiffusionDPOTrainer,
    DiffusionNFTConfig,
    DiffusionNFTTrainer,
)
from trimtab_lm import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    IterativeSFTConfig,
    IterativeSFTTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trimtab_lm.environments import EnvironmentRollout, Reply
from trimtab_lm.sampling.backends import TransformersRollout
from trimtab_lm.sampling.rollout import SamplingSettings

WORDS = ["the cat", "a dog", "an owl", "two ants"]
SETTINGS: dict[str, Any] = {
    "max_steps": 1,
    "logging_steps": 1,
    "per_device_train_batch_size": 4,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}
ROWS = Dataset.from_dict({"text": WORDS})
PAIRS = Dataset.from_dict({"prompt": WORDS, "chosen": [" is good"] * 4, "rejected": [" is bad"] * 4})
PROMPTS = Dataset.from_dict({"prompt": WORDS})


class Patient:
    """An environment that ends after two turns."""

    def reset(self) -> None:
        self.turns = 0

    def step(self, text: str, ids: list[int]) -> Reply:
        self.turns += 1
        return Reply("go on", reward=1.0, done=self.turns == 2)


class Names(TrainerCallback):
    """Collects the names of everything that a trainer logs."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        self.names |= set(logs or ())


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def vowels(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(text.count(vowel) for vowel in "aeiou")) for text in completions]


def logged(trainer: Any) -> set[str]:
    """Returns the names logged in training and evaluation by a trainer on `transformers.Trainer`."""
    names = Names()
    trainer.add_callback(names)
    trainer.train()
    trainer.evaluate()
    return names.names


def sft(folder: Path) -> set[str]:
    data = {"train_dataset": ROWS, "eval_dataset": ROWS, "processing_class": tiny.tokenizer()}
    args = SFTConfig(str(folder), include_num_input_tokens_seen="all", **SETTINGS)
    return logged(SFTTrainer(tiny.gpt2(), args, **data))


def reward(folder: Path) -> set[str]:
    data = {"train_dataset": PAIRS, "eval_dataset": PAIRS, "processing_class": tiny.tokenizer()}
    args = RewardConfig(str(folder), gradient_checkpointing=False, **SETTINGS)
    return logged(RewardTrainer(tiny.scorer(), args, **data))


def dpo(folder: Path) -> set[str]:
    data = {"train_dataset": PAIRS, "eval_dataset": PAIRS, "processing_class": tiny.tokenizer()}
    return logged(DPOTrainer(tiny.gpt2(), args=DPOConfig(str(folder), **SETTINGS), **data))


def kto(folder: Path) -> set[str]:
    rows = Dataset.from_dict({"prompt": WORDS, "completion": [" is good", " is bad"] * 2, "label": [True, False] * 2})
    data = {"train_dataset": rows, "eval_dataset": rows, "processing_class": tiny.tokenizer()}
    return logged(KTOTrainer(tiny.gpt2(), args=KTOConfig(str(folder), **SETTINGS), **data))


def grpo(folder: Path) -> set[str]:
    """Runs three times: with a reference and dual clipping; with the sampler's log-probabilities; in an environment."""
    common: dict[str, Any] = {**SETTINGS, "num_generations": 2, "max_completion_length": 4}
    sampled = {"rollout_backend": "continuous_batching", "rollout_backend_kwargs": {"max_batch_tokens": 256}}
    names = set()
    for options in ({"beta": 0.1, "delta": 2.0}, {**sampled, "importance_sampling_cap": 2.0}):
        args = GRPOConfig(str(folder), **common, **options)
        names |= logged(GRPOTrainer(tiny.gpt2(), [length, vowels], args, PROMPTS, PROMPTS, tiny.tokenizer()))
    backend = TransformersRollout(SamplingSettings(max_completion_length=4), tiny.tokenizer(), batch_size=8)
    talk = EnvironmentRollout(backend, Patient, tiny.tokenizer(), max_completion_length=20, max_turns=2)
    args = GRPOConfig(str(folder), **common)
    return names | logged(GRPOTrainer(tiny.gpt2(), None, args, PROMPTS, PROMPTS, tiny.tokenizer(), rollout=talk))


def iterative_sft(folder: Path) -> set[str]:
    args, names = IterativeSFTConfig(str(folder), **SETTINGS | {"max_steps": 2}), Names()
    data = {"eval_dataset": ROWS, "processing_class": tiny.tokenizer()}
    trainer = IterativeSFTTrainer(tiny.gpt2(), args, callbacks=[names], **data)
    returned = trainer.step(texts=WORDS)
    trainer.evaluate()
    return names.names | set(returned)


def ppo(folder: Path) -> set[str]:
    """Runs three times: with a dataset and two rewards; with the sampler's log-probabilities; in an environment."""
    names: set[str] = set()
    backend = TransformersRollout(SamplingSettings(max_completion_length=4), tiny.tokenizer(), batch_size=8)
    talk = EnvironmentRollout(backend, Patient, tiny.tokenizer(), max_completion_length=20, max_turns=2)
    ends = tiny.tokenizer(pad_token="</s>")
    sampled = {"rollout_backend": "continuous_batching", "rollout_backend_kwargs": {"max_batch_tokens": 256}}
    for config, arguments, tokenizer, options in (
        ({}, {}, ends, {"max_new_tokens": 4}),
        ({**sampled, "importance_sampling_cap": 2.0}, {}, tiny.tokenizer(), {"max_new_tokens": 4}),
        ({}, {"rollout": talk}, tiny.tokenizer(), None),
    ):
        trainer = tiny.ppo(arguments={"dataset": PROMPTS, "tokenizer": tokenizer, **arguments}, steps=1, **config)
        trainer.train(
            [length, vowels],
            generation_kwargs=options,
            on_step=lambda step, logs, batch: names.update(logs),
        )
    return names


def ddpo(folder: Path) -> set[str]:
    names: set[str] = set()
    for options in ({"init_kl_coef": 0.1, "eval_freq": 1}, {"estimator": "rwr"}):
        config = DDPOConfig(
            num_epochs=1,
            sample_num_steps=2,
            sample_batch_size=2,
            sample_num_batches_per_epoch=1,
            train_batch_size=2,
            mixed_precision="no",
            logdir=str(folder / options.get("estimator", "is")),
            **options,
        )
        trainer = DDPOTrainer(
            config,
            lambda images, *_: images.mean((1, 2, 3)),
            lambda: ("a cat", {}),
            tiny_diffusion.stable_diffusion(),
            eval_prompts=[("a dog", {})],
        )
        log = trainer.tracker.log
        trainer.tracker.log = lambda stats, step, log=log: (names.update(stats), log(stats, step))
        trainer.train()
    return names


def alignprop(folder: Path) -> set[str]:
    names: set[str] = set()
    sizes = {"sample_num_steps": 2, "train_batch_size": 2, "mixed_precision": "no"}
    config = AlignPropConfig(num_epochs=1, logdir=str(folder), **sizes)
    trainer = AlignPropTrainer(
        config, lambda images, *_: images.mean((1, 2, 3)), lambda: ("a cat", {}), tiny_diffusion.stable_diffusion()
    )
    log = trainer.tracker.log
    trainer.tracker.log = lambda stats, step: (names.update(stats), log(stats, step))
    trainer.train()
    return names


def diffusion_dpo(folder: Path) -> set[str]:
    names: set[str] = set()
    config = DiffusionDPOConfig(logdir=str(folder), mixed_precision="no", train_batch_size=2)
    rows = [{"prompt": "a cat", "chosen": torch.ones(3, 16, 16), "rejected": torch.zeros(3, 16, 16)}] * 2
    trainer = DiffusionDPOTrainer(config, tiny_diffusion.stable_diffusion(), rows)
    log = trainer.tracker.log
    trainer.tracker.log = lambda stats, step: (names.update(stats), log(stats, step))
    trainer.train()
    return names


def diffusion_nft(folder: Path) -> set[str]:
    names: set[str] = set()
    sizes = {"sample_num_steps": 2, "sample_batch_size": 2, "group_size": 2, "train_batch_size": 2}
    config = DiffusionNFTConfig(
        num_epochs=1, logdir=str(folder), mixed_precision="no", train_gradient_accumulation_steps=2, **sizes
    )
    trainer = DiffusionNFTTrainer(
        config, lambda images, *_: images.mean((1, 2, 3)), lambda: ("a cat", {}), tiny_diffusion.stable_diffusion()
    )
    log = trainer.tracker.log
    trainer.tracker.log = lambda stats, step: (names.update(stats), log(stats, step))
    trainer.train()
    return names


RUNS: dict[str, Callable[[Path], set[str]]] = {
    "sft": sft,
    "reward": reward,
    "dpo": dpo,
    "kto": kto,
    "ppo": ppo,
    "grpo": grpo,
    "iterative-sft": iterative_sft,
    "ddpo": ddpo,
    "alignprop": alignprop,
    "diffusion-dpo": diffusion_dpo,
    "diffusion-nft": diffusion_nft,
}
