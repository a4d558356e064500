"""Training whose parameters, gradients and optimizer state are sharded over the processes, under torchrun.

`folder,case,...`: those cases, or all. Each process saves what it logged and the full weights as folder/<rank>.pt.
"""

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from tests.lm import tiny
from tests.processes import let_accelerate_shard_on_cpu
from torch.distributed.tensor import DTensor

from trimtab_lm.sft import SFTConfig, SFTTrainer

GLOBAL_BATCH = 8
TEXTS = ["".join("abcdefgh "[(i * k) % 9] for k in range(1, 3 + 5 * (i % 4))) + "." for i in range(1, 33)]
QUIET = {"use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "report_to": "none"}
RATES = {"learning_rate": 1e-2, "max_grad_norm": 0.1, "max_steps": 3, "gradient_accumulation_steps": 2}
PLAIN = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def gpt2() -> Any:
    return tiny.exact(tiny.gpt2(**PLAIN))


def llama() -> Any:
    return tiny.exact(tiny.llama())


def settings(world_size: int, **more: Any) -> dict[str, Any]:
    """Of a config: a global batch in two micro-batches, sharded where there are several processes."""
    sizes = {"per_device_train_batch_size": GLOBAL_BATCH // 2 // world_size, "per_device_eval_batch_size": 2}
    sharded = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}} if world_size > 1 else {}
    return QUIET | RATES | sizes | sharded | more


def sft(build: Callable[[], Any], folder: str, world_size: int, **more: Any) -> Any:
    return SFTTrainer(
        build(),
        SFTConfig(folder, **settings(world_size, **more)),
        train_dataset=Dataset.from_dict({"text": TEXTS}),
        eval_dataset=Dataset.from_dict({"text": TEXTS[:7]}),
        processing_class=tiny.tokenizer(),
    )


CASES: dict[str, Callable[[str, int], Any]] = {
    "sft": lambda folder, world_size: sft(llama, folder, world_size),
    "sft tied": lambda folder, world_size: sft(gpt2, folder, world_size),
}


def trained(case: str, folder: str, world_size: int = 1) -> dict[str, Any]:
    """What is logged in three steps and in an evaluation on an odd number of rows, and the weights."""
    trainer = CASES[case](folder, world_size)
    trainer.train()
    trainer.evaluate()
    timed = ("runtime", "per_second", "flos")
    weights = trainer.accelerator.get_state_dict(trainer.model)
    return {
        "logs": [
            {name: value for name, value in log.items() if not any(word in name for word in timed)}
            for log in trainer.state.log_history
        ],
        "weights": {name: weight.clone() for name, weight in weights.items()},
        "local": sum(local_size(parameter) for parameter in trainer.model.parameters()),
        "moments": sum(local_size(moment) for state in trainer.optimizer.state.values() for moment in state.values()),
    }


def local_size(tensor: torch.Tensor) -> int:
    """Elements of a tensor on this process."""
    return tensor.to_local().numel() if isinstance(tensor, DTensor) else tensor.numel()


def main(folder: str, *cases: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    let_accelerate_shard_on_cpu()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.save({case: trained(case, folder, world_size) for case in cases or CASES}, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1].split(","))
