"""Supervised fine-tuning on documents of token ids; the loss covers every token."""

import random
import tempfile
from typing import Any

import torch
from datasets import Dataset
from tools.bench.measuring import Clock, Load, Measurement, Tokens, total
from tools.bench.models import load, tokenizer
from tools.bench.sizes import Size, token_ids
from tools.bench.tasks.training import shared_arguments, train
from transformers import DataCollatorForSeq2Seq, LlamaForCausalLM

EQUAL = 100  # documents per step, if they have equal lengths


def run(package: str, size: Size, settings: dict[str, Any], folder: str) -> Measurement:
    """Measures one side.

    Besides config fields, `settings` may have `documents` (a step has 100 documents of equal length, and this many in
    each micro-batch); `collator`; and `loop`: "plain" for a training loop without a Trainer.
    """
    is_packed = settings.get("packing", False)
    if documents := settings.pop("documents", 0):
        rows = of_one_length(size)
        settings |= {"per_device_train_batch_size": documents, "gradient_accumulation_steps": EQUAL // documents}
    else:
        rows = pairs_of_full_rows(size) if is_packed else token_ids(size, size.rows * (size.steps + 1), seed=0)
    words, clock = tokenizer(size.vocab_size), Clock(size.device)
    policy = load(LlamaForCausalLM, folder, "policy", size)
    clock.watch(policy)
    arguments: dict[str, Any] = {}
    if settings.pop("collator", None) == "padded":
        arguments["data_collator"] = DataCollatorForSeq2Seq(words)
    return (plain_loop if settings.pop("loop", None) == "plain" else train)(
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


def plain_loop(
    package: str, algorithm: str, size: Size, settings: dict[str, Any], load: Load, clock: Clock, **arguments: Any
) -> Measurement:
    """Measures the same steps in a loop that does nothing but call our collator, forward pass and loss."""
    from trimtab_lm import SFTConfig, SFTTrainer
    from trimtab_lm.sft.algorithm import score_labels, token_nll

    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(args=SFTConfig(**shared_arguments(size, folder) | settings), **arguments)
    model, losses = trainer.model.train(), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=trainer.args.learning_rate, fused=True)
    rows = iter(list(trainer.train_dataset))

    def step() -> None:
        batch = trainer.data_collator([next(rows) for _ in range(size.rows)])
        scores = score_labels(model, batch, policy=model)
        loss = token_nll(scores, count=len(scores.logprobs))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    clock.time(step, size.steps)
    return clock.measurement(size, load, {"first loss": losses[0], **clock.read})


def of_one_length(size: Size) -> list[list[int]]:
    """Returns a hundred documents of equal length for each step."""
    draw, vocabulary = random.Random(0), int(size.llama["vocab_size"])
    count, length = EQUAL * (size.steps + 1), 100
    return [[draw.randrange(3, vocabulary) for _ in range(length)] for _ in range(count)]


def pairs_of_full_rows(size: Size) -> list[list[int]]:
    """Returns documents that fill a row two by two, so that both sides pack without gaps and read the same tokens."""
    longest, vocabulary = size.longest, int(size.llama["vocab_size"])
    draw = random.Random(0)
    lengths = [
        length
        for short in draw.choices(range(longest // 16, longest // 2), k=size.rows * (size.steps + 1))
        for length in (short, longest - short)
    ]
    return [[draw.randrange(3, vocabulary) for _ in range(length)] for length in lengths]


def needed(size: Size, rows: list[list[int]]) -> Load:
    """Returns the load: forward and backward passes take three times the FLOPs of the forward pass."""
    tokens = total(Tokens.of(0, [len(row)], scored=len(row) - 1) for row in rows)
    return Load(tokens.read, "tokens", 3 * tokens.forward_flops(size))
