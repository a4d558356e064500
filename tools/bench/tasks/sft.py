"""Supervised fine-tuning on documents of token ids, of which every token counts."""

import random
from typing import Any

from datasets import Dataset
from tools.bench.measuring import Clock, Load, Measurement, Tokens, total
from tools.bench.models import load, tokenizer
from tools.bench.sizes import Size, token_ids
from tools.bench.tasks.training import train
from transformers import DataCollatorForSeq2Seq, LlamaForCausalLM


def run(package: str, size: Size, settings: dict[str, Any], folder: str) -> Measurement:
    """Measures one side."""
    is_packed = settings.get("packing", False)
    rows = pairs_of_full_rows(size) if is_packed else token_ids(size, size.rows * (size.steps + 1), seed=0)
    words, clock = tokenizer(size), Clock(size.device)
    policy = load(LlamaForCausalLM, folder, "policy", size)
    clock.watch(policy)
    arguments: dict[str, Any] = {}
    if settings.pop("collator", None) == "padded":
        arguments["data_collator"] = DataCollatorForSeq2Seq(words)
    return train(
        package,
        "SFT",
        size,
        {"max_length": size.longest if is_packed else None} | settings,
        needed(size, rows[len(rows) // (size.steps + 1) :]),
        clock,
        model=policy,
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=words,
        **arguments,
    )


def pairs_of_full_rows(size: Size) -> list[list[int]]:
    """Documents of which two and two fill a row, so that both sides pack without a gap, and read the same tokens."""
    longest, vocabulary = size.longest, int(size.llama["vocab_size"])
    draw = random.Random(0)
    lengths = [
        length
        for short in draw.choices(range(longest // 16, longest // 2), k=size.rows * (size.steps + 1))
        for length in (short, longest - short)
    ]
    return [[draw.randrange(3, vocabulary) for _ in range(length)] for length in lengths]


def needed(size: Size, rows: list[list[int]]) -> Load:
    """Forward and backward, three times the forward's FLOPs."""
    tokens = total(Tokens.of(0, [len(row)], scored=len(row) - 1) for row in rows)
    return Load(tokens.read, "tokens", 3 * tokens.forward_flops(size))
