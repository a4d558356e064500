"""Fine-tuning on a global batch shared by the processes; runs all cases, and writes results to the given file."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig
from tests.lm import tiny
from tests.processes import process_of_many

from trimtab_lm.iterative_sft import IterativeSFTConfig, IterativeSFTTrainer
from trimtab_lm.sft import SFTConfig, SFTTrainer

GLOBAL_BATCH = 8
TEXTS = ["".join("abcdefgh "[(i * k) % 9] for k in range(1, 3 + 5 * (i % 4))) + "." for i in range(1, 33)]
PAIRS = {"prompt": [text[:2] for text in TEXTS], "completion": [text[2:] for text in TEXTS]}
QUIET = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "optim": "sgd"}
PLAIN = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
RATES = {"learning_rate": 0.1, "max_grad_norm": 0.1}  # an unclipped gradient of the wrong size shows


def rows(*, streamed: bool = False) -> Any:
    data = Dataset.from_dict({"text": TEXTS})
    return IterableDataset.from_generator(lambda: iter(data)) if streamed else data


def gpt2() -> Any:
    return tiny.exact(tiny.gpt2(**PLAIN))


def llama() -> Any:
    return tiny.exact(tiny.llama())


def t5() -> Any:
    return tiny.exact(tiny.t5(initializer_factor=1.0, dropout_rate=0.0))


# By name: the model, its settings, the data. The three steps take eight of 32 rows each; packed, they are 16 rows.
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], Callable[[], Any]]] = {
    "padding-free": (gpt2, {}, rows),
    "unclipped": (gpt2, {"max_grad_norm": 0.0}, rows),
    "accumulated": (llama, {"gradient_accumulation_steps": 2}, rows),
    "packed": (llama, {"packing": True, "max_length": 24}, rows),
    "encoder-decoder": (t5, {"gradient_accumulation_steps": 2}, lambda: Dataset.from_dict(PAIRS)),
    "stream": (gpt2, {}, lambda: rows(streamed=True)),
    "iterative": (llama, {"gradient_accumulation_steps": 2}, rows),  # IterativeSFTTrainer.train
}


def trained(name: str, folder: str, *, world_size: int = 1) -> dict[str, Any]:
    """Returns the weights after three steps, training statistics, and an evaluation on an odd number of rows."""
    build, settings, data = CASES[name]
    accumulation = settings.get("gradient_accumulation_steps", 1)
    sizes = {
        "per_device_train_batch_size": GLOBAL_BATCH // accumulation // world_size,
        "per_device_eval_batch_size": 2,
        "max_steps": 3,
    }
    columns = PAIRS if build is t5 else {"text": TEXTS}
    kind, config = (IterativeSFTTrainer, IterativeSFTConfig) if name == "iterative" else (SFTTrainer, SFTConfig)
    trainer = kind(
        build(),
        config(folder, **QUIET | RATES | sizes | settings),
        train_dataset=data(),
        eval_dataset=Dataset.from_dict({name: column[:7] for name, column in columns.items()}),
        processing_class=tiny.tokenizer(),
    )
    trainer.train()
    metrics = trainer.evaluate()
    logs = trainer.state.log_history[: trainer.args.max_steps]
    return {
        "logs": [{key: log[key] for key in ("loss", "entropy", "grad_norm")} for log in logs],
        "metrics": {key: metrics[key] for key in ("eval_loss", "eval_entropy")},
        "weights": tiny.weights(trainer.model),
    }


STEPS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "gpt2": (gpt2, {}),
    "unclipped": (gpt2, {"max_grad_norm": 0.0}),
    "several windows": (llama, {"gradient_accumulation_steps": 2}),
    "a short last batch": (gpt2, {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 3}),
    "encoder-decoder": (t5, {}),
}
"""The model and settings for each case of IterativeSFTTrainer.step."""


def stepped(name: str, folder: str, *, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """Calls step twice, with half of the rows on each process, and evaluates on an odd number of rows."""
    build, settings = STEPS[name]
    accumulation = settings.get("gradient_accumulation_steps", 1)
    columns = {name: column[:7] for name, column in (PAIRS if build is t5 else {"text": TEXTS}).items()}
    trainer = iterative(build(), folder, GLOBAL_BATCH // world_size // accumulation, columns, **settings)
    history = []
    for call in range(2):
        inputs, targets = tiny.rows(GLOBAL_BATCH, 3, 9, seed=call), tiny.rows(GLOBAL_BATCH, 2, 5, seed=10 + call)
        half = slice(rank * GLOBAL_BATCH // world_size, (rank + 1) * GLOBAL_BATCH // world_size)
        history.append(trainer.step(inputs[half], labels=targets[half] if build is t5 else None))
    history.append({"loss": trainer.evaluate()["eval_loss"]})
    return {"stats": history, "weights": tiny.weights(trainer.model)}


def iterative(
    model: Any, folder: str, batch_size: int, columns: dict[str, list[str]], **settings: Any
) -> IterativeSFTTrainer:
    sizes = {"per_device_train_batch_size": batch_size, "per_device_eval_batch_size": 2, "max_steps": 10}
    args = IterativeSFTConfig(folder, **QUIET | RATES | sizes | settings)
    data = Dataset.from_dict(columns)
    return IterativeSFTTrainer(model, args, eval_dataset=data, processing_class=tiny.tokenizer())


def unequal_rows(folder: str, rank: int) -> str:
    """Returns the error when this process has one row more than the other; the trainer still works afterwards."""
    trainer = iterative(gpt2(), folder, 4, {"text": TEXTS[:1]})
    try:
        trainer.step(tiny.rows(3 + rank, 3, 5))
    except ValueError as error:
        trainer.step(tiny.rows(3, 3, 5))
        return str(error)
    return "no error"


def with_adapters(folder: str, rank: int) -> dict[str, torch.Tensor]:
    """Returns the weights after a step on adapters that each process drew differently."""
    torch.manual_seed(rank)
    args = SFTConfig(folder, **QUIET | RATES, max_steps=1, per_device_train_batch_size=4)
    adapters = LoraConfig(r=2, target_modules=["c_attn"])
    trainer = SFTTrainer(gpt2(), args, train_dataset=rows(), processing_class=tiny.tokenizer(), peft_config=adapters)
    trainer.train()
    return tiny.weights(trainer.model)


def main(folder: str) -> None:
    with process_of_many() as (rank, world_size):
        results = {
            "sft": {name: trained(name, folder, world_size=world_size) for name in CASES},
            "steps": {name: stepped(name, folder, rank=rank, world_size=world_size) for name in STEPS},
            "unequal rows": unequal_rows(folder, rank),
            "adapters": with_adapters(folder, rank),
        }
        torch.save(results, f"{folder}/{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
