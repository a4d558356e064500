"""`trimtab memory` prints the activations that a micro-batch takes on the pretend accelerator."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tests.accelerator.budgets import VOCABULARY, Meter, SecondStep, arguments, collected, quiet, texts
from tests.lm import tiny
from tests.test_every_trainer import length
from tools.bench.models import SPECIAL, tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from trimtab_cli.memory import Memory, MemoryConfig, engines, memory, size_of
from trimtab_lm import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

pytestmark = [pytest.mark.accelerator, pytest.mark.filterwarnings("ignore")]
ROWS, LENGTH, GROUP = 4, 256, 4  # rows of a micro-batch, tokens of a row, answers of a group
PAIR, NEW = LENGTH // 4, LENGTH // 8  # tokens of an answer of a pair, and of one in a group
SCORED = {"sft": 0, "reward": 2 * ROWS * PAIR, "dpo": 2 * ROWS * PAIR, "kto": ROWS * PAIR}
SCORED |= {"grpo": ROWS * GROUP * NEW, "ppo": ROWS * PAIR}
SHAPES: dict[str, dict[str, Any]] = {
    "all weights": {},
    "adapters": {"lora_rank": 8},
    "checkpointing": {"checkpointing": True},
    "a large vocabulary": {"vocab_size": 16_000},
    "bfloat16": {"weights": "bfloat16"},
}
CASES = [*((trainer, "all weights") for trainer in SCORED), ("sft", "a large vocabulary"), ("reward", "checkpointing")]
CASES += [("dpo", "adapters"), ("dpo", "a large vocabulary"), ("grpo", "adapters"), ("ppo", "checkpointing")]
CASES += [("ppo", "bfloat16")]


def llama(vocab_size: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        num_labels=1,
        initializer_range=0.1,  # attention then shows, and the trainers choose their layouts by it
        **SPECIAL,
    )


def columns(**lengths: int) -> Dataset:
    """Two optimizer steps of two micro-batches each."""
    return Dataset.from_dict({name: texts(4 * ROWS, words, seed) for seed, (name, words) in enumerate(lengths.items())})


def trained(config: MemoryConfig, model: Any, folder: Path, meter: Meter) -> Any:
    """Takes two steps of two micro-batches, and returns the trainer."""
    adapters = LoraConfig(r=config.lora_rank, target_modules="all-linear") if config.lora_rank else None
    is_mixed = config.weights != "bfloat16"
    if config.trainer == "ppo":
        sizes = {"batch_size": 2 * ROWS, "mini_batch_size": ROWS, "gradient_accumulation_steps": 2, "ppo_epochs": 1}
        precision = {"mixed_precision": "bf16" if is_mixed else "no"}
        settings: dict[str, Any] = {"gradient_checkpointing": config.checkpointing, "accelerator_kwargs": precision}
        args = PPOConfig(output_dir=str(folder), steps=2, **sizes, **settings)
        policy = tiny.with_value_head(model, peft_config=adapters)
        trainer = PPOTrainer(args, policy, tokenizer=tokenizer(VOCABULARY))
        rows = [texts(2 * ROWS, words, seed) for seed, words in enumerate((LENGTH - PAIR, PAIR))]
        queries, responses = (
            [torch.tensor(tokenizer(VOCABULARY)(text).input_ids, device="musa") for text in column] for column in rows
        )
        for step in range(2):
            if step == 1:
                meter.begin()
            trainer.step(queries, responses, [torch.tensor(float(i)) for i in range(2 * ROWS)])
        meter.end()
        return trainer
    options = {"processing_class": tokenizer(VOCABULARY), "callbacks": [SecondStep(meter)], "peft_config": adapters}
    common = {"bf16": is_mixed, "gradient_checkpointing": config.checkpointing, "gradient_accumulation_steps": 2}
    common |= arguments(folder, ROWS)
    pairs = {"prompt": LENGTH - 2 * PAIR, "chosen": PAIR, "rejected": PAIR}
    if config.trainer == "sft":
        args = SFTConfig(**common, max_length=LENGTH)
        trainer = SFTTrainer(model, args, train_dataset=columns(text=LENGTH), **options)
    elif config.trainer == "reward":
        trainer = RewardTrainer(model, RewardConfig(**common), train_dataset=columns(**pairs), **options)
    elif config.trainer == "dpo":
        trainer = DPOTrainer(model, args=DPOConfig(**common), train_dataset=columns(**pairs), **options)
    elif config.trainer == "kto":
        rows = columns(prompt=LENGTH - PAIR, completion=PAIR)
        rows = rows.add_column("label", [i % 2 == 0 for i in range(len(rows))])
        trainer = KTOTrainer(model, args=KTOConfig(**common), train_dataset=rows, **options)
    else:
        sampling = {"max_completion_length": NEW, "generation_kwargs": {"min_new_tokens": NEW}}
        args = GRPOConfig(**common, num_generations=GROUP, **sampling)
        prompts = columns(prompt=LENGTH - GROUP * NEW)
        trainer = GRPOTrainer(model, reward_funcs=length, args=args, train_dataset=prompts, **options)
    trainer.train()
    return trainer


@pytest.mark.parametrize(("trainer", "shape"), CASES)
def test_activations_are_those_of_a_step_within_ten_percent(
    trainer: str, shape: str, tmp_path: Path, device: ModuleType
):
    settings = dict(SHAPES[shape])
    model = llama(settings.pop("vocab_size", VOCABULARY))
    sizes = {"tokens": ROWS * LENGTH, "length": LENGTH, "scored": SCORED[trainer], "answers": GROUP}
    config = MemoryConfig("a model", trainer=trainer, gpus=1, **sizes, **{"checkpointing": False} | settings)
    printed: Memory = memory(size_of(model, config), engines(config)["one GPU"], config)
    kind = LlamaForSequenceClassification if trainer == "reward" else LlamaForCausalLM
    with quiet(), collected():
        meter = Meter()
        torch.manual_seed(0)
        done = trained(config, kind(model).to(getattr(torch, config.weights or "float32")), tmp_path, meter)
    reference = getattr(done, "ref_model", None)
    frozen = sum(weight.nbytes for weight in reference.parameters()) if reference is not None else 0
    states = printed.weights + printed.gradients + printed.optimizer + frozen
    assert printed.activations == pytest.approx(meter.need.figures["bytes"] - states, rel=0.1)
