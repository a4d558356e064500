"""GRPO: every step samples groups of completions of a fixed length, and trains on them."""

from typing import Any

from datasets import Dataset
from tools.bench.measuring import Clock, Load, Measurement, Tokens, total
from tools.bench.models import load, text, tokenizer
from tools.bench.sizes import Size, token_ids
from tools.bench.tasks.training import train
from transformers import LlamaForCausalLM


def run(package: str, size: Size, settings: dict[str, Any], folder: str) -> Measurement:
    """Measures one side. TRL's batch size counts completions, trimtab's counts prompts."""
    count = size.prompts * (size.steps + 1)
    prompts = [row[: max(2 * len(row) // 3, 1)] for row in token_ids(size, count, seed=20)]
    policy, clock = load(LlamaForCausalLM, folder, "policy", size), Clock(size.device)
    clock.watch(policy)
    facts: dict[str, float] = {}

    def reward(completion_ids: list[list[int]], **_: object) -> list[float]:
        facts["sampled"] = float(sum(map(len, completion_ids)))
        return [float(sum(ids) % 7) for ids in completion_ids]

    shape = {
        "per_device_train_batch_size": size.prompts * (size.group if package == "trl" else 1),
        "num_generations": size.group,
        "max_completion_length": size.new_tokens,
        "generation_kwargs": {"min_new_tokens": size.new_tokens},
        "shuffle_dataset": False,
    }
    return train(
        package,
        "GRPO",
        size,
        shape | settings,
        needed(size, [len(prompt) for prompt in prompts[size.prompts :]]),
        clock,
        facts,
        model=policy,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": [text(prompt) for prompt in prompts]}),
        processing_class=tokenizer(size.vocab_size),
    )


def needed(size: Size, prompts: list[int]) -> Load:
    """Returns the load: one pass to sample and three to train; each prompt is read once."""
    new = size.new_tokens
    tokens = total(Tokens.of(prompt, [new] * size.group, scored=new * size.group) for prompt in prompts)
    return Load(len(prompts) * size.group * new, "tokens", 4 * tokens.forward_flops(size))
