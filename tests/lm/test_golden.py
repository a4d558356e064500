"""Ten steps of each trainer on transformers.Trainer, in float64, equal recorded curves: see `tests.curves`."""

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from datasets import Dataset
from tests.curves import Curve, assert_recorded, record
from tests.lm import tiny

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

STEPS = 10
TEXTS = ["hello world.", "abc.", "a longer text than the others.", "x y z.", "no.", "some more words.", "tiny."]
PAIRS = Dataset.from_dict(
    {
        "prompt": [text[:2] for text in TEXTS],
        "chosen": [text[2:] for text in TEXTS],
        "rejected": [text[3:] + " no" for text in TEXTS],
    }
)
KEYS = {
    "sft": ("loss", "entropy", "grad_norm"),
    "reward": ("loss", "accuracy", "scores/margin", "calibration_error", "grad_norm"),
    "dpo": ("loss", "rewards/margins", "rewards/accuracies", "logps/chosen", "entropy/rejected", "grad_norm"),
    "kto": ("loss", "kl", "rewards/chosen", "rewards/rejected", "logps/chosen", "grad_norm"),
    "grpo": (
        "loss",
        "reward",
        "reward_std",
        "kl",
        "clip_ratio/region_mean",
        "entropy",
        "completions/mean_length",
        "grad_norm",
    ),
}


def count_a(completions: list[str], **columns: Any) -> list[float]:
    return [text.count("a") - 0.1 * len(text) for text in completions]


def trainer_of(name: str, folder: str) -> Any:
    settings: dict[str, Any] = {
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "seed": 1,
    }
    data: dict[str, Any] = {"train_dataset": PAIRS, "processing_class": tiny.tokenizer()}
    model = tiny.gpt2(dtype=torch.float64)
    if name == "sft":
        text = Dataset.from_dict({"text": TEXTS})
        return SFTTrainer(model, SFTConfig(folder, **settings), **data | {"train_dataset": text})
    if name == "reward":
        settings["share_prompts"] = True  # dropout draws other numbers for other rows
        return RewardTrainer(tiny.scorer(dtype=torch.float64), RewardConfig(folder, **settings), **data)
    if name == "dpo":
        return DPOTrainer(model, args=DPOConfig(folder, **settings), **data)
    if name == "kto":
        answers = {"prompt": [*PAIRS["prompt"]] * 2, "completion": [*PAIRS["chosen"], *PAIRS["rejected"]]}
        labelled = Dataset.from_dict(answers | {"label": [True] * len(TEXTS) + [False] * len(TEXTS)})
        return KTOTrainer(model, args=KTOConfig(folder, **settings), **data | {"train_dataset": labelled})
    rollout = {"num_generations": 4, "max_completion_length": 6, "steps_per_generation": 2, "beta": 0.1}
    prompts = Dataset.from_dict({"prompt": [text[:2] for text in TEXTS * 2]})
    return GRPOTrainer(model, count_a, GRPOConfig(folder, **settings | rollout), **data | {"train_dataset": prompts})


def trained(name: str) -> Curve:
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(name, folder)
        trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == STEPS
    return {key: [float(line.get(key, 0.0)) for line in lines] for key in KEYS[name]}


def iterated() -> Curve:
    """Calls `step` five times, with two optimizer steps each."""
    with tempfile.TemporaryDirectory() as folder:
        config = IterativeSFTConfig(
            folder,
            use_cpu=True,
            disable_tqdm=True,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            max_steps=STEPS,
        )
        trainer = IterativeSFTTrainer(tiny.gpt2(dtype=torch.float64), config, processing_class=tiny.tokenizer())
        stats = [trainer.step(texts=[text + "abcde"[call] for text in TEXTS]) for call in range(STEPS // 2)]
    return {key: [float(one[key]) for one in stats] for key in ("loss", "grad_norm", "learning_rate", "num_tokens")}


CURVES: dict[str, Callable[[], Curve]] = {
    **{name: partial(trained, name) for name in KEYS},
    "iterative_sft": iterated,
}


@pytest.mark.filterwarnings("ignore:step .* health/")
@pytest.mark.parametrize("name", CURVES)
def test_ten_steps_are_the_recorded_ones(name):
    assert_recorded(name, CURVES[name]())


if __name__ == "__main__":
    record(CURVES)
