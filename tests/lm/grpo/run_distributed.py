"""Runs GRPO on scripted completions, case by case; each process writes its results into the given folder.

A scripted sampler answers by the prompt alone, so every division of the prompts has the same rollouts.
"""

import sys
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from tests.lm import tiny
from tests.processes import process_of_many
from torch import Tensor

from trimtab_lm.environments import EnvironmentRollout, Reply
from trimtab_lm.grpo import GRPOConfig, GRPOTrainer
from trimtab_lm.sampling.rollout import Rollout, SamplingSettings, require_version

GLOBAL_BATCH = 8
TEXTS = ["hi", "abc", "the cat", "dog.", "a b", "zzz", "go on", "m", "ten", "nine", "x y z", "quick"]

CASES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo": {"loss_type": "grpo", "scale_rewards": "batch", "beta": 0.2},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "scale_rewards": "rloo"},
    "masked": {"mask_truncated_completions": True, "steps_per_generation": 2},
    "environment": {"loss_type": "grpo", "beta": 0.2, "mask_truncated_completions": True},
}
STEPS = 4


class Scripted:
    """Answers each prompt with fixed text; the first always ends by itself, others may be cut at the limit."""

    def __init__(self, limit: int = 6, temperature: float = 1.0):
        self.limit, self.settings = limit, SamplingSettings(limit, temperature)
        self.calls: list[int] = []  # number of prompts in each call
        self.versions: list[int] = []
        self.version: int | None = None

    def sync(self, model: Any, version: int) -> None:
        self.version = version

    def generate(self, prompts: Sequence[Tensor], *, num_generations: int, version: int, seed: int) -> Rollout:
        require_version(self.version, version)
        self.calls.append(len(prompts))
        self.versions.append(version)
        completions, ended = [], []
        for prompt in prompts:
            generator = torch.Generator().manual_seed(sum((i + 1) * 37 * int(t) for i, t in enumerate(prompt)))
            for k in range(num_generations):
                length = int(torch.randint(1, self.limit + 2, (), generator=generator)) if k else 2
                tokens = torch.randint(4, len(tiny.VOCABULARY), (length,), generator=generator)
                ended.append(length <= self.limit)
                completions.append(torch.cat([tokens[:-1], torch.tensor([tiny.EOS])]) if ended[-1] else tokens[:-1])
        return Rollout(completions, ended)


class Impatient:
    """Repeats what it hears until it hears a vowel; episodes take one to four turns."""

    def reset(self) -> None:
        """Does nothing."""

    def step(self, text: str, ids: list[int]) -> Reply:
        return Reply(f"{text}.", reward=0.1 * len(ids), done=any(vowel in text for vowel in "aeiou"))


class Fixed(Scripted):
    """Returns three completions per prompt; `ended` says which of them end by themselves."""

    def __init__(self, ended: Sequence[bool]):
        super().__init__()
        self.ended = ended

    def generate(self, prompts: Sequence[Tensor], *, num_generations: int, version: int, seed: int) -> Rollout:
        completions = [torch.tensor([5 + k] * (k + 1)) for k in range(num_generations)]
        return Rollout(completions * len(prompts), list(self.ended) * len(prompts))


def vowels(completions: list[str], **_: Any) -> list[float]:
    return [sum(text.count(vowel) for vowel in "aeiou") + 0.1 * len(text) for text in completions]


def prompts(count: int) -> Dataset:
    return Dataset.from_dict({"prompt": [TEXTS[i % len(TEXTS)] + "ab"[i % 2] * (i // 12) for i in range(count)]})


def config(folder: str, **settings: Any) -> GRPOConfig:
    """Returns a config with few prompts and no logs on the CPU, changed by `settings`."""
    defaults: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": 2,
        "num_generations": 3,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "max_steps": STEPS,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": True,
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
    }
    return GRPOConfig(**defaults | settings)


def trainer(folder: str, model: Any = None, reward: Any = vowels, **settings: Any) -> GRPOTrainer:
    """Returns a trainer of a tiny GPT-2 on 24 prompts; `settings` go to the config or to the trainer."""
    names = (
        "train_dataset",
        "eval_dataset",
        "rollout",
        "peft_config",
        "callbacks",
        "processing_class",
        "model_init",
        "optimizers",
        "reward_processing_classes",
    )
    arguments = {name: settings.pop(name) for name in names if name in settings}
    arguments = {"train_dataset": prompts(24), "processing_class": tiny.tokenizer(), **arguments}
    arguments.setdefault("rollout", Scripted(temperature=settings.get("temperature", 1.0)))
    if "model_init" not in arguments and model is None:
        model = tiny.gpt2()
    return GRPOTrainer(model, reward, config(folder, **settings), **arguments)


def run(name: str, *, batch_size: int, accumulation: int = 1) -> dict[str, Any]:
    """Runs a few steps of a case; returns weights, logs and metrics of an evaluation on an odd number of prompts."""
    backend = Scripted()
    talk = EnvironmentRollout(backend, Impatient, tiny.tokenizer(), max_completion_length=50, max_turns=4)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        grpo = trainer(
            folder,
            tiny.gpt2(dtype=torch.float64),
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            per_device_eval_batch_size=2,
            eval_dataset=prompts(5),
            average_tokens_across_devices=True,
            rollout=talk if name == "environment" else backend,
            **CASES[name],
        )
        grpo.train()
        metrics = grpo.evaluate()
        logs = [entry for entry in grpo.state.log_history if "loss" in entry]
    timed = ("runtime", "per_second", "preparation")
    return {
        "weights": {key: value.clone() for key, value in grpo.model.state_dict().items()},
        "logs": logs,
        "metrics": {key: value for key, value in metrics.items() if not any(word in key for word in timed)},
        "calls": backend.calls,
    }


def main(folder: str) -> None:
    with process_of_many() as (rank, _):
        results = {name: run(name, batch_size=GLOBAL_BATCH // 4, accumulation=2) for name in CASES}
        torch.save(results, f"{folder}/{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
