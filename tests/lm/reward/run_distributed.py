"""Tiny scorers, pairs and trainers, and the program of two processes for test_reward_distributed."""

import sys
from typing import Any

import torch
from datasets import Dataset
from tests.lm import tiny
from tests.processes import process_of_many
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    T5Config,
    T5ForSequenceClassification,
)

from trimtab_lm.reward import RewardConfig, RewardTrainer

D = torch.float64
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": tiny.WIDTH, "intermediate_size": 24}
SETTINGS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gpt2": (
        GPT2ForSequenceClassification,
        GPT2Config,
        {"n_embd": tiny.WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.3},
    ),
    "llama": (LlamaForSequenceClassification, LlamaConfig, {**LAYERS, "initializer_range": 0.3}),
    "bert": (
        BertForSequenceClassification,
        BertConfig,
        {**LAYERS, "max_position_embeddings": 64, "initializer_range": 0.3},
    ),
    "t5": (
        T5ForSequenceClassification,
        T5Config,
        {
            "d_model": tiny.WIDTH,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 2,
            "initializer_factor": 1.0,
            "decoder_start_token_id": tiny.PAD,
        },
    ),
}
"""Scorers of each type: decoders laid out as trees, and classifiers that run on padded rows."""


def scorer(kind: str = "gpt2", *, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """Returns a sequence classifier with one label, and without dropout unless `settings` add it."""
    model, config, sizes = SETTINGS[kind]
    names = {
        "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        "llama": ("attention_dropout",),
        "t5": ("dropout_rate",),
        "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    }
    still = dict.fromkeys(names[kind], 0.0)
    model_of_scores = tiny.seeded(model, config(**sizes | tiny.TOKENS | still | {"num_labels": 1} | settings), seed)
    return tiny.exact(model_of_scores) if dtype is D else model_of_scores


def pairs(count: int, *, seed: int = 0, with_margin: bool = False) -> Dataset:
    """Returns tokenized pairs of several lengths; both texts share a prompt and end with EOS."""
    rows = []
    for i in range(count):
        prompt, chosen, rejected = (row.tolist() for row in tiny.rows(3, 2, 7, seed=100 * seed + i))
        texts = {"chosen": [*prompt, *chosen, tiny.EOS], "rejected": [*prompt, *rejected, tiny.EOS]}
        row: dict[str, Any] = {f"input_ids_{side}": ids for side, ids in texts.items()}
        row |= {f"attention_mask_{side}": [1] * len(ids) for side, ids in texts.items()}
        rows.append(row | ({"margin": 0.25 * (i % 4)} if with_margin else {}))
    return Dataset.from_list(rows)


def good_and_bad(count: int, seed: int) -> Dataset:
    """Returns answers of random letters; the better one uses only the first half of the alphabet."""
    generator = torch.Generator().manual_seed(seed)

    def text(first: int, last: int) -> str:
        length = int(torch.randint(3, 8, (), generator=generator))
        letters = torch.randint(first, last, (length,), generator=generator).tolist()
        return "".join(tiny.CHARACTERS[i] for i in letters)

    rows = [{"prompt": text(0, 26) + " ", "chosen": text(0, 13), "rejected": text(13, 26)} for _ in range(count)]
    return Dataset.from_list(rows)


def config(folder: Any, **settings: Any) -> RewardConfig:
    """Returns a quiet config for the CPU, without checkpoints."""
    quiet = {"save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
    return RewardConfig(output_dir=str(folder), **quiet | settings)


def trainer(model: Any, folder: Any, arguments: dict[str, Any] | None = None, **settings: Any) -> RewardTrainer:
    """Returns a trainer. arguments: the trainer's; settings: its config's."""
    arguments = {"processing_class": tiny.tokenizer(), **(arguments or {})}
    return RewardTrainer(model, config(folder, **settings), **arguments)


GLOBAL_BATCH = 8


def trained(kind: str, folder: str, *, world_size: int = 1, accumulation: int = 1) -> dict[str, Any]:
    """Returns weights after three steps of eight pairs, training statistics, and an evaluation of an odd number."""
    reward_trainer = trainer(
        scorer(kind, dtype=D),
        folder,
        {"train_dataset": pairs(24, with_margin=True), "eval_dataset": pairs(7, seed=1, with_margin=True)},
        per_device_train_batch_size=GLOBAL_BATCH // world_size // accumulation,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=accumulation,
        max_steps=3,
        logging_strategy="steps",
        logging_steps=1,
        learning_rate=0.1,
        center_rewards_coefficient=0.1,
        optim="sgd",
    )
    reward_trainer.train()
    logs = [log for log in reward_trainer.state.log_history if "loss" in log]
    metrics = {**reward_trainer.evaluate(), **reward_trainer.predict(pairs(5, seed=2)).metrics}
    kept = {name: value for name, value in metrics.items() if not name.endswith(("runtime", "per_second", "_time"))}
    return {"logs": logs, "metrics": kept, "weights": tiny.weights(reward_trainer.model)}


def main(folder: str) -> None:
    with process_of_many() as (rank, world_size):
        results = {kind: trained(kind, folder, world_size=world_size) for kind in ("gpt2", "bert")}
        torch.save(results, f"{folder}/{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
