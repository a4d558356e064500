"""Every trainer calls its documented methods, also when a subclass or an assignment replaces them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from datasets import Dataset
from tests import test_every_trainer as every
from tests.diffusion import tiny as tiny_diffusion
from tests.lm import tiny
from tests.lm.dpo.test_trainer import adapted

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
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trimtab_lm.dpo.chain2024 import CHAIN

pytestmark = pytest.mark.filterwarnings("ignore")

SETTINGS = every.SETTINGS | {"max_steps": 1, "gradient_checkpointing": False}
PAIRS = every.PREFERENCES.select(range(4))
TEXTS = Dataset.from_dict({"text": every.WORDS[:4]})
PROMPTS = Dataset.from_dict({"prompt": every.WORDS[:4]})

HOOKS = (
    *("train", "compute_loss", "log", "training_step", "prediction_step", "get_train_dataloader", "evaluate"),
    *("get_eval_dataloader", "get_batch_samples", "create_optimizer", "create_scheduler", "evaluation_loop"),
    *("save_model", "predict", "get_test_dataloader"),
)
"""Methods of transformers.Trainer that its documentation invites users to override."""


def sft(kind: Any, folder: str) -> Any:
    args = SFTConfig(folder, **SETTINGS)
    return kind(tiny.gpt2(), args, None, TEXTS, TEXTS, processing_class=tiny.tokenizer())


def reward(kind: Any, folder: str) -> Any:
    return kind(tiny.scorer(), RewardConfig(folder, **SETTINGS), None, PAIRS, PAIRS, processing_class=tiny.tokenizer())


def dpo(kind: Any, folder: str) -> Any:
    args = DPOConfig(folder, generate_during_eval=True, max_new_tokens=2, **SETTINGS)
    rows = {"train_dataset": PAIRS, "eval_dataset": PAIRS, "processing_class": tiny.tokenizer()}
    return kind(adapted(), None, args, **rows)


def grpo(kind: Any, folder: str) -> Any:
    args = GRPOConfig(folder, num_generations=2, max_completion_length=3, **SETTINGS)
    return kind(tiny.gpt2(), every.length, args, PROMPTS, PROMPTS, processing_class=tiny.tokenizer())


def fine_tune(trainer: Any) -> None:
    trainer.train()
    trainer.evaluate()
    trainer.predict(trainer.given_rows)


def iterative_sft(kind: Any, folder: str) -> Any:
    args = IterativeSFTConfig(folder, eval_strategy="steps", eval_steps=1, **SETTINGS)
    return kind(tiny.gpt2(), args, eval_dataset=TEXTS, processing_class=tiny.tokenizer())


def fine_tune_in_steps(trainer: Any) -> None:
    trainer.step(texts=every.WORDS[:4])


def ppo(kind: Any, folder: str) -> Any:
    sizes = {"batch_size": 2, "mini_batch_size": 2, "ppo_epochs": 1, "output_dir": folder}
    rows = Dataset.from_dict({"query": every.WORDS[:4]})
    return kind(PPOConfig(**sizes, steps=1, save_steps=1), tiny.policy(), None, tiny.tokenizer(), rows)


def optimise(trainer: Any) -> None:
    trainer.train(lambda queries, responses, **_: [1.0, 0.0], generation_kwargs={"max_new_tokens": 3})
    trainer.save_pretrained(f"{trainer.config.output_dir}/final")


def ddpo(kind: Any, folder: str) -> Any:
    sizes = {"sample_num_steps": 2, "sample_batch_size": 2, "sample_num_batches_per_epoch": 1, "train_batch_size": 2}
    config = DDPOConfig(num_epochs=1, mixed_precision="no", logdir=folder, **sizes)
    pipeline = DDPOStableDiffusionPipeline(tiny_diffusion.stable_diffusion())
    return kind(config, lambda images, *_: images.flatten(1).mean(1), lambda: ("a cat", {}), pipeline)


def alignprop(kind: Any, folder: str) -> Any:
    sizes = {"sample_num_steps": 2, "train_batch_size": 2}
    config = AlignPropConfig(num_epochs=1, mixed_precision="no", logdir=folder, **sizes)
    pipeline = DDPOStableDiffusionPipeline(tiny_diffusion.stable_diffusion())
    return kind(config, lambda images, *_: images.flatten(1).mean(1), lambda: ("a cat", {}), pipeline)


def diffusion_dpo(kind: Any, folder: str) -> Any:
    config = DiffusionDPOConfig(mixed_precision="no", logdir=folder, train_batch_size=2)
    rows = [{"prompt": "a cat", "chosen": torch.ones(3, 16, 16), "rejected": torch.zeros(3, 16, 16)}] * 2
    return kind(config, tiny_diffusion.stable_diffusion(), rows)


def diffusion_nft(kind: Any, folder: str) -> Any:
    sizes = {"sample_num_steps": 2, "sample_batch_size": 2, "group_size": 2, "train_batch_size": 2}
    config = DiffusionNFTConfig(
        num_epochs=1, mixed_precision="no", logdir=folder, train_gradient_accumulation_steps=2, **sizes
    )
    pipeline = DDPOStableDiffusionPipeline(tiny_diffusion.stable_diffusion())
    return kind(config, lambda images, *_: images.flatten(1).mean(1), lambda: ("a cat", {}), pipeline)


def denoise(trainer: Any) -> None:
    trainer.train()
    trainer.save_pretrained(f"{trainer.config.logdir}/final")


Case = tuple[type, Callable[[Any, str], Any], Callable[[Any], None], tuple[str, ...]]
TRAINERS: dict[str, Case] = {
    "SFT": (SFTTrainer, sft, fine_tune, HOOKS),
    "Reward": (RewardTrainer, reward, fine_tune, (*HOOKS, "visualize_samples")),
    "DPO": (DPOTrainer, dpo, fine_tune, tuple({*HOOKS, *CHAIN, "generate_from_model_and_ref"})),
    "GRPO": (GRPOTrainer, grpo, fine_tune, HOOKS),
    "IterativeSFT": (
        IterativeSFTTrainer,
        iterative_sft,
        fine_tune_in_steps,
        (
            *("step", "compute_loss", "log", "training_step", "prediction_step", "evaluate", "get_eval_dataloader"),
            *("evaluation_loop", "create_optimizer", "create_scheduler", "save_model"),
        ),
    ),
    "PPO": (
        PPOTrainer,
        ppo,
        optimise,
        (
            *("train", "generate", "step", "batched_forward_pass", "prepare_model_inputs", "compute_rewards"),
            *("compute_advantages", "loss", "train_minibatch", "record_step_stats", "gather_stats", "log_stats"),
            *("prepare_dataloader", "save_checkpoint", "save_pretrained", "create_model_card"),
        ),
    ),
    "DDPO": (
        DDPOTrainer,
        ddpo,
        denoise,
        (
            *("train", "step", "calculate_loss", "loss", "compute_rewards", "save_checkpoint", "save_pretrained"),
            "create_model_card",
        ),
    ),
    "Diffusion-DPO": (
        DiffusionDPOTrainer,
        diffusion_dpo,
        denoise,
        ("train", "step", "batches", "save_checkpoint", "save_pretrained", "create_model_card"),
    ),
    "DiffusionNFT": (
        DiffusionNFTTrainer,
        diffusion_nft,
        denoise,
        (
            *("train", "step", "draw", "sample", "compute_rewards", "optimality", "save_checkpoint"),
            *("save_pretrained", "create_model_card"),
        ),
    ),
    "AlignProp": (
        AlignPropTrainer,
        alignprop,
        denoise,
        (
            *("train", "step", "draw", "calculate_loss", "compute_rewards", "save_checkpoint", "save_pretrained"),
            "create_model_card",
        ),
    ),
}
IN_CONSTRUCTORS = {"prepare_dataloader"}
"""Methods that only a constructor calls, before anyone can assign a replacement."""


def recorder(name: str, method: Callable[..., Any], seen: list[str]) -> Callable[..., Any]:
    def recorded(*args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return method(*args, **kwargs)

    return recorded


@pytest.mark.parametrize("way", ["subclass", "assignment"])
@pytest.mark.parametrize("name", TRAINERS)
def test_every_documented_method_is_called_where_it_is_replaced(name: str, way: str, tmp_path: Any) -> None:
    base, build, use, methods = TRAINERS[name]
    seen: list[str] = []
    kind = type("Own", (base,), {})
    if way == "subclass":
        for method in methods:
            own = recorder(method, getattr(base, method), seen)
            is_static = isinstance(vars(base).get(method) or vars(base.__mro__[1]).get(method), staticmethod)
            setattr(kind, method, staticmethod(own) if is_static else own)
    trainer = build(kind, str(tmp_path))
    trainer.given_rows = {"SFT": TEXTS, "GRPO": PROMPTS}.get(name, PAIRS)
    if way == "assignment":
        for method in methods:
            setattr(trainer, method, recorder(method, getattr(trainer, method), seen))
    use(trainer)
    assert set(methods) - set(seen) == (IN_CONSTRUCTORS & set(methods) if way == "assignment" else set())
