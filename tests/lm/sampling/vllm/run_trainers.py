"""Trains GRPO in two processes on the samples of one vLLM server, for test_engine_trainers."""

import sys
from typing import Any

import torch
from tests.lm.grpo.run_distributed import trainer
from tests.lm.sampling import wide
from tests.processes import let_accelerate_shard_on_cpu, process_of_many

SHARDED = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}


def train(folder: str, policy: str, server: str, is_sharded: str, is_asynchronous: str) -> list[dict[str, Any]]:
    settings: dict[str, Any] = {"max_steps": 3, "importance_sampling_cap": 2.0, "learning_rate": 1e-3}
    settings["asynchronous_rollouts"] = is_asynchronous == "True"
    if is_sharded == "True":
        let_accelerate_shard_on_cpu()
        settings |= SHARDED
    backend = {"rollout_backend": "vllm_server", "rollout_backend_kwargs": {"servers": [server]}}
    grpo = trainer(f"{folder}/run", wide.loaded(policy), rollout=None, **settings, **backend)
    grpo.train()
    return [entry for entry in grpo.state.log_history if "loss" in entry]


def main(folder: str, *args: str) -> None:
    with process_of_many() as (rank, _):
        torch.save(train(folder, *args), f"{folder}/{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
