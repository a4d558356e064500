"""Two steps of each trainer of language models on an accelerator, straight or through a checkpoint."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import Dataset
from peft import LoraConfig
from tests.lm import tiny
from tests.test_every_trainer import (
    ANSWERS,
    PREFERENCES,
    WORDS,
    length,
    train_by_calls,
    train_by_ppo,
    train_on_transformers,
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

ACCELERATOR = "musa" if find_spec("torch_musa") else "cuda"
"""The pretend accelerator where `make test-accelerator` has put it on Python's path, elsewhere a GPU."""

COMPLETIONS = Dataset.from_dict({"prompt": WORDS, "completion": [f" is {word}" for word in WORDS]})
SETTINGS: dict[str, Any] = {
    "max_steps": 2,
    "save_steps": 1,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 1,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "report_to": "none",
    "disable_tqdm": True,
}
PRECISIONS: dict[str, dict[str, Any]] = {"float32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}
ARCHITECTURES = {
    "sft": ["causal", "encoder-decoder"],
    "iterative_sft": ["causal", "encoder-decoder"],
    "reward": ["causal"],
    "dpo": ["causal", "encoder-decoder"],
    "kto": ["causal", "encoder-decoder"],
    "grpo": ["causal"],
    "ppo": ["causal", "encoder-decoder", "critic", "shared"],
}


class Case(NamedTuple):
    trainer: str
    architecture: str
    tuning: str
    precision: str

    def base(self) -> Any:
        """The model before adapters and heads."""
        if self.architecture == "encoder-decoder":
            return tiny.t5(initializer_factor=1.0)  # fp16 holds its gradients from the first scale on
        return tiny.scorer() if self.trainer == "reward" else tiny.gpt2()

    def adapters(self) -> LoraConfig | None:
        kind = "SEQ_CLS" if self.trainer == "reward" else None
        return LoraConfig(r=2, task_type=kind, init_lora_weights=False) if self.tuning == "lora" else None


def cases() -> Iterator[Case]:
    for trainer, architectures in ARCHITECTURES.items():
        for architecture in architectures:
            for tuning in ("full", "lora"):
                if (architecture, tuning) != ("shared", "lora"):  # an adapter has no layers to share with a reference
                    yield from (Case(trainer, architecture, tuning, precision) for precision in PRECISIONS)


# Trainers over transformers.Trainer


def build(case: Case, folder: Path, **settings: Any) -> Any:
    """A trainer of the case, with the same weights each time."""
    torch.manual_seed(0)
    options: dict[str, Any] = SETTINGS | PRECISIONS[case.precision] | settings
    shared: dict[str, Any] = {"peft_config": case.adapters(), "processing_class": tiny.tokenizer()}
    if case.trainer == "iterative_sft":
        options = {name: value for name, value in options.items() if not name.startswith("eval")}
        return IterativeSFTTrainer(case.base(), IterativeSFTConfig(str(folder), **options), **shared)
    if case.trainer == "sft":
        is_packed = case.architecture == "causal"
        args: Any = SFTConfig(str(folder), max_length=24, packing=is_packed, **options)
        return SFTTrainer(case.base(), args, train_dataset=COMPLETIONS, eval_dataset=COMPLETIONS, **shared)
    if case.trainer == "reward":
        args = RewardConfig(str(folder), **options)
        return RewardTrainer(case.base(), args, train_dataset=PREFERENCES, eval_dataset=PREFERENCES, **shared)
    if case.trainer == "dpo":
        args = DPOConfig(str(folder), **options)
        return DPOTrainer(case.base(), args=args, train_dataset=PREFERENCES, eval_dataset=PREFERENCES, **shared)
    if case.trainer == "kto":
        args = KTOConfig(str(folder), **options)
        return KTOTrainer(case.base(), args=args, train_dataset=ANSWERS, eval_dataset=ANSWERS, **shared)
    return grpo(case, folder, length, **settings)


def grpo(case: Case, folder: Path, rewards: Any, rollout: Any = None, **settings: Any) -> GRPOTrainer:
    torch.manual_seed(0)
    options = SETTINGS | {"num_generations": 3, "max_completion_length": 6, "beta": 0.1} | PRECISIONS[case.precision]
    prompts = Dataset.from_dict({"prompt": WORDS})
    return GRPOTrainer(
        case.base(),
        reward_funcs=rewards,
        args=GRPOConfig(str(folder), **options | settings),
        train_dataset=prompts,
        eval_dataset=prompts.select(range(2)),
        processing_class=tiny.tokenizer(),
        peft_config=case.adapters(),
        rollout=rollout,
    )


# PPO


def ppo(case: Case, folder: Path, kind: type[PPOTrainer] = PPOTrainer, rollout: Any = None) -> PPOTrainer:
    torch.manual_seed(0)
    precision = {} if case.precision == "float32" else {"mixed_precision": case.precision}
    sizes: dict[str, Any] = {"steps": 2, "save_steps": 1, "batch_size": 4, "mini_batch_size": 2, "learning_rate": 1e-2}
    arguments: dict[str, Any] = {"tokenizer": tiny.tokenizer(), "dataset": Dataset.from_dict({"query": WORDS})}
    if case.architecture == "critic":
        arguments["value_model"] = tiny.policy(1)
    if case.architecture == "shared":
        arguments["num_shared_layers"] = 1
    model = tiny.with_value_head(case.base(), **({"peft_config": case.adapters()} if case.tuning == "lora" else {}))
    settings = PPOConfig(output_dir=str(folder), accelerator_kwargs=precision, **sizes)
    return kind(settings, model, rollout=rollout, **arguments)


# Two steps


def forget_accelerator() -> None:
    """Lets the next trainer choose a precision of its own: accelerate keeps one for a process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def train(case: Case, folder: Path, *, interrupt: bool) -> dict[str, torch.Tensor]:
    """Returns the weights after two steps; `interrupt`: a second trainer resumes after the first step."""

    def on_device(make: Callable[..., Any], *args: Any) -> Any:
        trainer = make(case, *args)
        assert trainer.accelerator.device.type == ACCELERATOR
        return trainer

    if case.trainer == "ppo":
        return train_by_ppo(partial(on_device, ppo, folder), interrupt=interrupt)
    made = partial(on_device, build)
    if case.trainer == "iterative_sft":
        return train_by_calls(made, folder, interrupt=interrupt, labels=case.architecture != "causal")
    trainer, weights = train_on_transformers(made, folder, interrupt=interrupt)
    assert any("eval_loss" in row for row in trainer.state.log_history)
    return weights
