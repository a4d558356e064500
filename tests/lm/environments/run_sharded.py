"""Runs sharded policies in two processes with different numbers of turns, for test_sharded."""

import sys
from collections import defaultdict
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin
from datasets import Dataset
from tests.lm import tiny
from tests.lm.environments.conversations import Script, rollout, sampler
from tests.lm.environments.test_grpo import Partner
from tests.lm.grpo.run_distributed import Impatient, trainer
from tests.processes import let_accelerate_shard_on_cpu, process_of_many
from torch.distributed.tensor import DTensor

from trimtab_lm import PPOTrainer
from trimtab_lm.environments import EnvironmentRollout

SHARDED = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}
TURNS = defaultdict(
    lambda: ["."],  # a process without a conversation samples this
    {
        "a": ["bc"],
        "abcbc.": ["d."],
        "e": ["f."],
        "g": ["h"],
        "ghh.": ["ab"],
        "ghh.abab.": ["c."],
        "d": ["efg."],
    },
)
"""What the policy says in four conversations of one to three turns, by the text so far."""


def sampling(talk: EnvironmentRollout) -> list[int]:
    """Returns a list to which each generation adds its number of prompts."""
    turns: list[int] = []
    generate = talk.backend.generate

    def counted(prompts, **options):
        turns.append(len(prompts))
        return generate(prompts, **options)

    talk.backend.generate = counted  # type: ignore[method-assign]
    return turns


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the full weights. Collective."""
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()
    }


def by_grpo(folder: str) -> dict[str, Any]:
    """Returns the prompts of each generation, and the full weights after three steps."""
    talk = rollout(sampler(), Impatient, max_turns=4)
    turns = sampling(talk)
    settings = {"max_steps": 3, "num_generations": 2, "beta": 0.1, **SHARDED}
    grpo = trainer(f"{folder}/run", tiny.gpt2(), None, rollout=talk, **settings)
    grpo.train()
    return {"turns": turns, "weights": whole(grpo.model)}


def ppo(talk: EnvironmentRollout, queries: list[str], world_size: int) -> PPOTrainer:
    """Returns a trainer on four prompts per step over all processes, sharded if there are several."""
    plugin = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "reshard_after_forward": True}
    sharded = {"fsdp_plugin": FullyShardedDataParallelPlugin(**plugin)} if world_size > 1 else {}
    policy = tiny.policy(dtype=torch.float64)
    optimizer = torch.optim.SGD(policy.parameters(), lr=3e-3, momentum=0.5)
    arguments = {"dataset": Dataset.from_dict({"query": queries}), "rollout": talk, "optimizer": optimizer}
    sizes = {"batch_size": 4 // world_size, "mini_batch_size": 4 // world_size, "ppo_epochs": 2}
    return tiny.ppo(policy, arguments=arguments, accelerator_kwargs=sharded, init_kl_coef=0.3, **sizes)


def by_ppo(world_size: int) -> dict[str, Any]:
    """Like `by_grpo`, with PPO."""
    talk = rollout(sampler(), Impatient, max_turns=4)
    turns = sampling(talk)
    trained = ppo(talk, list("abcdefgh"), world_size)
    trained.train(steps=3)
    return {"turns": turns, "weights": whole(trained.actor_critic)}


def scripted(world_size: int) -> dict[str, Any]:
    """Returns statistics and full weights of three PPO steps on the conversations in `TURNS`."""
    trained = ppo(rollout(Script(TURNS), Partner), list("aegd"), world_size)
    history = trained.train(steps=3)
    untimed = [{name: value for name, value in stats.items() if not name.startswith("time/")} for stats in history]
    return {"stats": untimed, "weights": whole(trained.actor_critic)}


def main(folder: str) -> None:
    with process_of_many(let_accelerate_shard_on_cpu) as (rank, world_size):
        results = {"grpo": by_grpo(folder), "ppo": by_ppo(world_size), "scripted": scripted(world_size)}
        torch.save(results, f"{folder}/{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
