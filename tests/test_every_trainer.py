"""Every trainer takes a step, saves, resumes and takes another; this also runs with the lowest accepted versions."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tests.diffusion import tiny as tiny_diffusion
from tests.lm import tiny
from transformers import TrainerCallback

from trimtab_diffusion import (
    AlignPropConfig,
    AlignPropTrainer,
    DDPOConfig,
    DDPOStableDiffusionPipeline,
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
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

WORDS = ["the cat", "a dog", "an owl", "two ants", "hello", "go on", "nine", "x y z"]
SETTINGS: dict[str, Any] = {
    "max_steps": 2,
    "save_steps": 1,
    "logging_steps": 1,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "gradient_checkpointing": True,
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}
PREFERENCES = Dataset.from_dict(
    {
        "prompt": WORDS,
        "chosen": [" is good" for _ in WORDS],
        "rejected": [f" is bad {word}" for word in WORDS],
    }
)

ANSWERS = Dataset.from_dict(
    {
        "prompt": WORDS,
        "completion": [" is good" if i % 2 else f" is bad {word}" for i, word in enumerate(WORDS)],
        "label": [bool(i % 2) for i in range(len(WORDS))],
    }
)


class StopAfterFirstStep(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = True


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def sft(folder: str) -> SFTTrainer:
    rows = Dataset.from_dict({"text": WORDS})
    args = SFTConfig(folder, packing=True, max_length=24, **SETTINGS)
    return SFTTrainer(tiny.gpt2(), args, train_dataset=rows, processing_class=tiny.tokenizer())


def reward(folder: str) -> RewardTrainer:
    args = RewardConfig(folder, **SETTINGS)
    return RewardTrainer(tiny.scorer(), args, train_dataset=PREFERENCES, processing_class=tiny.tokenizer())


def dpo(folder: str) -> DPOTrainer:
    args = DPOConfig(folder, **SETTINGS)
    return DPOTrainer(tiny.llama(), args=args, train_dataset=PREFERENCES, processing_class=tiny.tokenizer())


def kto(folder: str) -> KTOTrainer:
    args = KTOConfig(folder, **SETTINGS)
    return KTOTrainer(tiny.llama(), args=args, train_dataset=ANSWERS, processing_class=tiny.tokenizer())


def grpo(folder: str, **config: Any) -> GRPOTrainer:
    args = GRPOConfig(folder, num_generations=3, max_completion_length=6, **SETTINGS | config)
    prompts = Dataset.from_dict({"prompt": WORDS})
    return GRPOTrainer(
        tiny.llama(), reward_funcs=length, args=args, train_dataset=prompts, processing_class=tiny.tokenizer()
    )


def trained_weights(before: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    assert tiny.moved(before, model)
    return tiny.weights(model)


def train_on_transformers(
    build: Callable[[str], Any], folder: Path, *, interrupt: bool
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Returns the trainer and its weights after two steps; `interrupt`: a second trainer resumes after the first."""
    if interrupt:
        first = build(str(folder))
        first.add_callback(StopAfterFirstStep())
        first.train()
        assert first.state.global_step == 1
    trainer = build(str(folder))
    before = tiny.weights(trainer.model)
    trainer.train(resume_from_checkpoint=interrupt or None)
    assert trainer.state.global_step == 2
    return trainer, trained_weights(before, trainer.model)


def train_by_calls(
    build: Callable[[str], Any], folder: Path, *, interrupt: bool, labels: bool = False
) -> dict[str, torch.Tensor]:
    """The same of IterativeSFT, a step for each call."""

    def step(words: list[str]) -> None:
        trainer.step(texts=words, **{"texts_labels": [f" is {word}" for word in words]} if labels else {})

    trainer = build(str(folder))
    before = tiny.weights(trainer.model)
    step(WORDS[:4])
    if interrupt:
        trainer = build(str(folder))
        trainer.train(resume_from_checkpoint=True)
    step(WORDS[4:])
    assert trainer.state.global_step == 2
    return trained_weights(before, trainer.model)


def train_by_ppo(build: Callable[[], PPOTrainer], *, interrupt: bool) -> dict[str, torch.Tensor]:
    """The same of PPO."""

    def train(steps: int) -> dict[str, torch.Tensor]:
        trainer = build()
        before = tiny.weights(trainer.actor_critic)
        trainer.train(
            lambda queries, responses, **_: length(responses),
            generation_kwargs={"max_new_tokens": 6},
            steps=steps,
            resume_from="latest",
        )
        return trained_weights(before, trainer.actor_critic)

    if interrupt:
        train(steps=1)
    return train(steps=2)


def iterative_sft(folder: str) -> IterativeSFTTrainer:
    args = IterativeSFTConfig(folder, **SETTINGS)
    return IterativeSFTTrainer(tiny.gpt2(), args, processing_class=tiny.tokenizer())


def ppo(folder: Path) -> PPOTrainer:
    config = PPOConfig(
        steps=2,
        save_steps=1,
        batch_size=4,
        mini_batch_size=2,
        learning_rate=1e-2,
        output_dir=str(folder),
    )
    prompts = Dataset.from_dict({"query": WORDS})
    return PPOTrainer(config, tiny.policy(), tokenizer=tiny.tokenizer(), dataset=prompts)


def train_pipeline(
    build: Callable[..., Any], settings: dict[str, Any], folder: Path, *, interrupt: bool
) -> dict[str, torch.Tensor]:
    def train(epochs: int) -> dict[str, torch.Tensor]:
        config = {
            "num_epochs": 2,
            "save_freq": 1,
            "resume_from": "latest",
            "logdir": str(folder / "logs"),
            "log_with": None,
            "seed": 3,
            "project_kwargs": {"project_dir": str(folder)},
            "mixed_precision": "no",
            "train_batch_size": 2,
            "train_learning_rate": 1e-2,
        }
        with tiny_diffusion.from_seed(1):  # LoRA weights are random at the start
            pipeline = DDPOStableDiffusionPipeline(tiny_diffusion.stable_diffusion(), use_lora=True)
        trainer = build(config | settings, pipeline)
        before = tiny.weights(pipeline.denoiser)
        trainer.train(epochs=epochs)
        return trained_weights(before, pipeline.denoiser)

    if interrupt:
        train(epochs=1)
    return train(epochs=2)


def brightness(images: torch.Tensor, *_: Any) -> torch.Tensor:
    return images.mean((1, 2, 3))


def ddpo(settings: dict[str, Any], pipeline: DDPOStableDiffusionPipeline) -> DDPOTrainer:
    return DDPOTrainer(DDPOConfig(**settings), brightness, lambda: ("a cat", {}), pipeline)


def alignprop(settings: dict[str, Any], pipeline: DDPOStableDiffusionPipeline) -> AlignPropTrainer:
    return AlignPropTrainer(AlignPropConfig(**settings), brightness, lambda: ("a cat", {}), pipeline)


def diffusion_dpo(settings: dict[str, Any], pipeline: DDPOStableDiffusionPipeline) -> DiffusionDPOTrainer:
    pictures = torch.rand(2, len(WORDS), 3, 16, 16, generator=tiny_diffusion.generator())
    rows = [
        {"prompt": word, "chosen": chosen, "rejected": rejected}
        for word, chosen, rejected in zip(WORDS, *pictures, strict=True)
    ]
    return DiffusionDPOTrainer(DiffusionDPOConfig(**settings), pipeline, rows)


def diffusion_nft(settings: dict[str, Any], pipeline: DDPOStableDiffusionPipeline) -> DiffusionNFTTrainer:
    return DiffusionNFTTrainer(DiffusionNFTConfig(**settings), brightness, lambda: ("a cat", {}), pipeline)


TRAINERS: dict[str, Callable[..., dict[str, torch.Tensor]]] = {
    "ppo": lambda folder, interrupt: train_by_ppo(partial(ppo, folder), interrupt=interrupt),
    "iterative_sft": partial(train_by_calls, iterative_sft),
    "ddpo": partial(
        train_pipeline, ddpo, {"sample_num_steps": 3, "sample_batch_size": 2, "sample_num_batches_per_epoch": 2}
    ),
    "alignprop": partial(train_pipeline, alignprop, {"sample_num_steps": 3, "train_gradient_accumulation_steps": 2}),
    "diffusion_dpo": partial(train_pipeline, diffusion_dpo, {"train_gradient_accumulation_steps": 2}),
    "diffusion_nft": partial(
        train_pipeline,
        diffusion_nft,
        {
            "sample_num_steps": 3,
            "sample_batch_size": 2,
            "group_size": 2,
            "train_gradient_accumulation_steps": 2,
            "old_decay_rate": 0.3,
        },
    ),
    **{
        build.__name__: lambda folder, interrupt, build=build: train_on_transformers(
            build, folder, interrupt=interrupt
        )[1]
        for build in (sft, reward, dpo, kto, grpo)
    },
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRAINERS)
def test_two_steps_are_one_step_a_save_a_resume_and_another(name: str, tmp_path: Path):
    straight = TRAINERS[name](tmp_path / "straight", interrupt=False)
    resumed = TRAINERS[name](tmp_path / "resumed", interrupt=True)
    assert all(torch.equal(value, resumed[key]) for key, value in straight.items())


@pytest.mark.filterwarnings("ignore")
def test_grpo_samples_by_continuous_batching(tmp_path: Path):
    trainer = grpo(str(tmp_path), rollout_backend="continuous_batching", save_strategy="no")
    before = tiny.weights(trainer.model)
    trainer.train()
    trained_weights(before, trainer.model)
