"""Sharded policies in two processes, whose conversations have different numbers of turns: run by test_sharded."""

import sys

import torch
from tests.lm import tiny
from tests.lm.environments.conversations import rollout, sampler
from tests.lm.grpo.run_distributed import Impatient, trainer
from tests.processes import let_accelerate_shard_on_cpu
from torch.distributed.tensor import DTensor

SHARDED = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}


def main(folder: str) -> None:
    let_accelerate_shard_on_cpu()
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
    torch.save({"turns": turns, "weights": weights}, f"{folder}/{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
