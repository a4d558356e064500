"""Two processes train GRPO on the samples of one vLLM server: run by test_engine_trainers."""

import sys

import torch
from tests.lm.grpo.run_distributed import trainer
from tests.lm.sampling import wide


def main(folder: str, policy: str, server: str) -> None:
    settings = {"max_steps": 3, "importance_sampling_cap": 2.0, "learning_rate": 1e-3}
    backend = {"rollout_backend": "vllm_server", "rollout_backend_kwargs": {"servers": [server]}}
    model = wide.loaded(policy)
    grpo = trainer(f"{folder}/run", model, rollout=None, **settings, **backend)
    grpo.train()
    logs = [entry for entry in grpo.state.log_history if "loss" in entry]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    torch.save({"logs": logs, "weights": weights}, f"{folder}/{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
