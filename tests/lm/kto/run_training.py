"""Tiny KTO runs for the tests; as a program, the runs of test_distributed.py, in each of its processes."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset
from tests.lm import tiny
from tests.lm.dpo.run_training import DROPLESS, text
from tests.lm.dpo.run_training import logged as logged
from tests.processes import process_of_many

from trimtab_lm.kto import KTOConfig, KTOTrainer
from trimtab_lm.kto.collator import UnpairedCollator

BUILDERS: dict[str, Any] = {
    "gpt2": lambda seed=0: tiny.gpt2(seed, **DROPLESS),
    "llama": tiny.llama,
    "t5": lambda seed=0: tiny.t5(seed, initializer_factor=1.0, dropout_rate=0.0),
}

SEEDS = {"gpt2": (1, 2), "llama": (1, 3), "t5": (1, 2)}
"""Of a policy and a reference between which the estimate of the KL is above 0."""


def rows(count: int = 8) -> list[dict[str, Any]]:
    """Returns distinct rows of unequal lengths; three of eight are desirable."""
    return [
        {
            "prompt": text(i, 2 + i % 5) + " ",
            "completion": text(3 * i + 1, 1 + i % 4),
            "label": i % 8 in (0, 3, 5),
        }
        for i in range(count)
    ]


def dataset(count: int = 8) -> Dataset:
    return Dataset.from_list(rows(count))


def trainer(model: Any, folder: Any, arguments: dict[str, Any] | None = None, **config: Any) -> Any:
    """Returns a trainer for one SGD step over eight rows. arguments: KTOTrainer's; config: KTOConfig's."""
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
        "desirable_weight": 1.75,  # the losses of 3 rows weigh 1.05 times those of 5
    }
    args = KTOConfig(str(folder), **settings | config)
    arguments = {"train_dataset": dataset(), "processing_class": tiny.tokenizer(), **(arguments or {})}
    return KTOTrainer(model, args=args, **arguments)


def trained(model: Any, folder: Any, arguments: dict[str, Any] | None = None, **config: Any) -> tuple[Any, Any]:
    """Trains; returns the trainer and the weights."""
    kto = trainer(model, folder, arguments, **config)
    kto.train()
    return kto, tiny.weights(kto.model)


class InParts:
    """Mismatches the rows of a batch within parts of a size, as processes with batches of that size do."""

    def __init__(self, collator: UnpairedCollator, size: int):
        self.collator, self.size = collator, size

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        others = []
        for start in range(0, len(rows), self.size):
            part = rows[start : start + self.size]
            others += [
                row | {"completion_input_ids": part[(i + 1) % len(part)]["completion_input_ids"]}
                for i, row in enumerate(part)
            ]
        return self.collator(rows) | {"mismatched": replace(self.collator, is_mismatched=False)(others)}


# The last evaluation batch of ten rows is filled up with repetitions, where there are two processes.
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {"gradient_accumulation_steps": 2},
    "t5": {"beta": 0.3},
    "apo": {"loss_type": "apo_zero_unpaired"},
}


def run(name: str, folder: Any, *, processes: int) -> dict[str, Any]:
    """Runs three steps over 24 rows, in batches of two processes, and an evaluation."""
    kind = name if name in BUILDERS else "gpt2"
    model, ref_model = (tiny.exact(BUILDERS[kind](seed)) for seed in SEEDS[kind])
    size = 4 // CASES[name].get("gradient_accumulation_steps", 1)
    arguments = {"train_dataset": dataset(24), "ref_model": ref_model}
    arguments["eval_dataset"] = dataset(10 if name == "apo" else 8)
    kto = trainer(
        model,
        f"{folder}/{name}-{processes}",
        arguments,
        per_device_train_batch_size=size * 2 // processes,
        per_device_eval_batch_size=4 * 2 // processes,
        max_steps=3,
        seed=3,
        **CASES[name],
    )
    if processes == 1 and name != "apo":
        collator = kto.data_collator
        kto.data_collator = InParts(collator, size)
    kto.train()
    if processes == 1 and name != "apo":
        kto.data_collator = InParts(collator, 4)
    metrics = kto.evaluate()
    excluded = ("runtime", "second", "preparation")
    kept = {key: value for key, value in metrics.items() if not any(word in key for word in excluded)}
    stats = [entry for entry in kto.state.log_history if "loss" in entry]
    return {"weights": tiny.weights(kto.model), "stats": stats, "metrics": kept}


def main(folder: str) -> None:
    with process_of_many() as (rank, world_size):
        results = {name: run(name, folder, processes=world_size) for name in CASES}
        torch.save(results, f"{folder}/{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
