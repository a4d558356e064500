"""PPO steps over a fixed global batch shared by the processes; runs all cases, and writes results to the given file."""

import os
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from datasets import Dataset
from tests.lm import tiny
from tests.lm.ppo.test_overrides import ForwardOf2024
from tests.processes import process_of_many
from transformers import BartConfig, BartForConditionalGeneration

from trimtab_lm import PPOTrainer

GLOBAL_BATCH, STEPS = 8, 2


@dataclass(frozen=True)
class Case:
    """How a process divides its share: `minibatch` and `accumulation` cover all of it in one optimizer step."""

    minibatch: int  # for each of two processes; a single one doubles it, or the accumulation
    accumulation: int = 1
    kind: Literal["gpt2", "bart", "llama", "t5"] = "gpt2"
    has_masks: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    doubles_accumulation: bool = False
    lr: float = 3e-3
    trainer: type[PPOTrainer] = PPOTrainer


SKIPPING = {"ppo_epochs": 2}
CASES = {
    "plain": Case(4),
    "accumulated": Case(1, 4),
    "masks": Case(2, 2, has_masks=True),
    "encoder-decoder": Case(2, 2, kind="bart", has_masks=True),
    "llama": Case(2, 2, kind="llama", has_masks=True),
    "t5": Case(2, 2, kind="t5", has_masks=True),
    "scaled": Case(
        2,
        2,
        config={
            "use_score_scaling": True,
            "use_score_norm": True,
            "score_clip": 1.5,
            "whiten_rewards": True,
            "gamma": 0.9,
            "target": 0.5,
            "horizon": 100,
            "init_kl_coef": 0.5,
            "max_grad_norm": 0.1,
            "missing_eos_penalty": 0.5,
        },
    ),
    "full": Case(2, 2, has_masks=True, config={"kl_penalty": "full"}),
    "forward of 2024": Case(2, 2, has_masks=True, trainer=ForwardOf2024),
    "stopped early": Case(2, 2, config={"early_stopping": True, "target_kl": 0.002}, lr=1e-1),
    "one process skips": Case(4, config={**SKIPPING, "ratio_threshold": 1.003}, doubles_accumulation=True, lr=1e-2),
    "both processes skip": Case(4, config={**SKIPPING, "ratio_threshold": 0.5}, doubles_accumulation=True),
}


def global_batch(step: int, *, has_masks: bool) -> dict[str, list[torch.Tensor]]:
    """Rows of very unequal lengths, the shorter half first, so that minibatches of similar length are the halves."""
    generator = torch.Generator().manual_seed(step)
    half = GLOBAL_BATCH // 2
    queries = tiny.rows(half, 2, 3, 10 * step) + tiny.rows(half, 4, 6, 10 * step + 1)
    responses = tiny.rows(half, 1, 4, 10 * step + 2) + tiny.rows(half, 5, 12, 10 * step + 3)
    responses[-1][-1] = tiny.EOS
    columns = {"queries": queries, "responses": responses}
    columns["scores"] = list(torch.randn(GLOBAL_BATCH, generator=generator))
    if has_masks:
        masks = [(torch.rand(len(row), generator=generator) < 0.6).long() for row in responses]
        for mask in masks:
            mask[0] = 1
        columns["response_masks"] = masks
    return columns


def bart(dtype: torch.dtype) -> BartForConditionalGeneration:
    sizes = {
        "d_model": tiny.WIDTH,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "init_std": 0.3,
        "decoder_start_token_id": tiny.BOS,
        "max_position_embeddings": 64,
    }
    config = BartConfig(**sizes | tiny.TOKENS)
    return tiny.seeded(BartForConditionalGeneration, config, dtype=dtype)


def make(case: Case, *, minibatch: int, accumulation: int, world_size: int) -> PPOTrainer:
    builders = {"gpt2": tiny.gpt2, "bart": bart, "llama": tiny.llama, "t5": partial(tiny.t5, initializer_factor=1.0)}
    base = builders[case.kind](dtype=torch.float64)
    model = tiny.with_value_head(base)
    # Unlike Adam, SGD shows a gradient of the wrong size, and does not magnify the rounding of a zero gradient.
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr, momentum=0.5)
    sizes = {
        "batch_size": GLOBAL_BATCH // world_size,
        "mini_batch_size": minibatch,
        "gradient_accumulation_steps": accumulation,
    }
    fixed = {"ppo_epochs": 3, "ratio_threshold": 1e9}
    return tiny.ppo(model, case.trainer, arguments={"optimizer": optimizer}, **fixed | sizes | case.config)


def steps(case: Case, *, minibatch: int, accumulation: int, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """Returns the statistics of every step, and the weights after them."""
    trainer = make(case, minibatch=minibatch, accumulation=accumulation, world_size=world_size)
    share = slice(rank * GLOBAL_BATCH // world_size, (rank + 1) * GLOBAL_BATCH // world_size)
    history = []
    for step in range(STEPS):
        columns = global_batch(step, has_masks=case.has_masks)
        history.append(trainer.step(**{name: column[share] for name, column in columns.items()}))
    module = trainer.accelerator.unwrap_model(trainer.actor_critic)
    return {"stats": history, "weights": tiny.weights(module), "kl_coef": trainer.kl_ctl.value}


def loop() -> dict[str, Any]:
    """Runs two steps of `train` on prompts, with a reward that depends on the response."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    prompts = Dataset.from_dict({"input_ids": [row.tolist() for row in tiny.rows(20, 2, 5)]})
    trainer = tiny.ppo(
        arguments={"dataset": prompts},
        batch_size=GLOBAL_BATCH // world_size,
        mini_batch_size=2,
        steps=2,
        gradient_accumulation_steps=2,
    )
    history: list[Any] = []
    batches: list[Any] = []

    def keep(step: int, stats: dict[str, Any], batch: dict[str, Any]) -> None:
        history.append(stats)
        batches.append(batch)

    trainer.train(
        lambda queries, responses, **columns: [float(len(response)) for response in responses],
        generation_kwargs={"max_new_tokens": 9},
        on_step=keep,
    )
    return {
        "stats": history,
        "queries": [[row.tolist() for row in batch["input_ids"]] for batch in batches],
        "responses": [batch["response"] for batch in batches],
        "same_query": trainer.generate(torch.tensor([5, 6]), max_new_tokens=20, do_sample=True).tolist(),
        "weights": tiny.weights(trainer.model),
    }


def main(folder: str) -> None:
    with process_of_many() as (rank, world_size):
        process = {"rank": rank, "world_size": world_size}
        results = {
            name: steps(case, minibatch=case.minibatch, accumulation=case.accumulation, **process)
            for name, case in CASES.items()
        }
        torch.save({**results, "train": loop()}, f"{folder}/{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
