"""Tiny DPO runs for the tests; as a program, the runs of test_dpo_distributed.py, in each of its processes."""

import sys
from string import ascii_lowercase
from typing import Any

import torch
from datasets import Dataset
from tests.lm import tiny
from tests.processes import process_of_many
from transformers import BartConfig, BartForConditionalGeneration

from trimtab_lm.dpo import DPOConfig, DPOTrainer

DROPLESS = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def bart() -> Any:
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
        "forced_eos_token_id": None,
    }
    return tiny.seeded(BartForConditionalGeneration, BartConfig(**sizes | tiny.TOKENS))


BUILDERS = {
    "gpt2": tiny.gpt2,
    "llama": tiny.llama,
    "t5": lambda seed=0: tiny.t5(seed, initializer_factor=1.0, dropout_rate=0.0),
}


def text(start: int, length: int) -> str:
    return "".join(ascii_lowercase[(start + 7 * i) % 26] for i in range(length))


def pairs(count: int = 8) -> list[dict[str, str]]:
    """Returns distinct preferences of unequal lengths."""
    return [
        {
            "prompt": text(i, 2 + i % 5) + " ",
            "chosen": text(3 * i + 1, 1 + i % 4),
            "rejected": text(5 * i + 2, 1 + i % 6),
        }
        for i in range(count)
    ]


def dataset(count: int = 8) -> Dataset:
    return Dataset.from_list(pairs(count))


def trainer(
    model: Any,
    folder: Any,
    *,
    kind: type[DPOTrainer] = DPOTrainer,
    arguments: dict[str, Any] | None = None,
    **config: Any,
) -> Any:
    """Returns a trainer for one SGD step over eight pairs. arguments: DPOTrainer's; config: DPOConfig's."""
    settings = {
        "max_steps": 1,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "report_to": "none",
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant",
    }
    args = DPOConfig(str(folder), **settings | config)
    arguments = {"train_dataset": dataset(), "processing_class": tiny.tokenizer(), **(arguments or {})}
    return kind(model, args=args, **arguments)


def trained(model: Any, folder: Any, **options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Trains; returns the trainer and the weights."""
    dpo_trainer = trainer(model, folder, **options)
    dpo_trainer.train()
    return dpo_trainer, tiny.weights(dpo_trainer.model)


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


class Replaced(DPOTrainer):
    """Runs the chain of documented methods."""

    def dpo_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().dpo_loss(*args, **kwargs)


def predicted(prediction: Any) -> dict[str, float]:
    chosen, rejected = prediction.predictions[:, 0], prediction.predictions[:, 1]
    return {"predicted": len(chosen), "margin": float((chosen - rejected).mean())}


# 10 rows are not a multiple of 4 x 2: repetitions fill the last evaluation batch.
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "t5": {"loss_type": ["sigmoid", "ipo"], "loss_weights": [1.0, 0.1]},
    "precomputed": {"precompute_ref_log_probs": True},
    "replaced": {"kind": Replaced, "compute_metrics": predicted},
}


def run(name: str, folder: Any, *, processes: int) -> dict[str, Any]:
    """Runs two steps over 16 pairs and an evaluation over 10; each process has its share."""
    config = {"max_steps": 2, "seed": 3} | CASES[name]
    size = config.pop("per_device_train_batch_size", 4)
    kind, metrics_of = config.pop("kind", DPOTrainer), config.pop("compute_metrics", None)
    data = {"train_dataset": dataset(16), "eval_dataset": dataset(10)}
    model = tiny.exact(BUILDERS.get(name, tiny.gpt2)())
    trainer, weights = trained(
        model,
        f"{folder}/{name}-{processes}",
        kind=kind,
        arguments=data if metrics_of is None else data | {"compute_metrics": metrics_of},
        per_device_train_batch_size=size * 2 // processes,
        per_device_eval_batch_size=8 // processes,
        **config,
    )
    metrics = trainer.evaluate()
    left_out = ("runtime", "second", "preparation", "logits/")  # 2024's mean logits go by the padding of a batch

    def kept(numbers: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in numbers.items() if not any(word in key for word in left_out)}

    stats = [kept(entry) for entry in trainer.state.log_history if "loss" in entry]
    return {"weights": weights, "stats": stats, "metrics": kept(metrics)}


def main(folder: str) -> None:
    with process_of_many() as (rank, world_size):
        results = {name: run(name, folder, processes=world_size) for name in CASES}
        torch.save(results, f"{folder}/{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
