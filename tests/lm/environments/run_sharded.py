"""Sharded policies in two processes, whose conversations have different numbers of turns: run by test_sharded."""

import sys
from typing import Any

import torch
from tests.lm import tiny
from tests.lm.environments.conversations import rollout, sampler
from tests.lm.grpo.run_distributed import Impatient, trainer
from tests.processes import let_accelerate_shard_on_cpu, process_of_many
from torch.distributed.tensor import DTensor

SHARDED = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}


def trained(folder: str) -> dict[str, Any]:
    """The prompts of each generation, and the full weights after three steps."""
    settings = {"max_steps": 3, "num_generations": 2, "beta": 0.1, **SHARDED}
    grpo = trainer(f"{folder}/run", tiny.gpt2(), None, rollout=rollout(sampler(), Impatient, max_turns=4), **settings)
    turns: list[int] = []
    generate = grpo.backend.backend.generate

    def counted(prompts, **options):
        turns.append(len(prompts))
        return generate(prompts, **options)

    grpo.backend.backend.generate = counted
    grpo.train()
    weights = {
        name: value.full_tensor() for name, value in grpo.model.state_dict().items() if isinstance(value, DTensor)
    }
    return {"turns": turns, "weights": weights}


def main(folder: str) -> None:
    with process_of_many(let_accelerate_shard_on_cpu) as (rank, _):
        torch.save(trained(folder), f"{folder}/{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
