"""Saves a PPO run and resumes it on the same or another number of processes, sharded if there are several.

`folder,loop,steps,resume`: loop is `train` or `step`, up to `steps`, from the latest checkpoint unless resume is
empty. `folder/<loop>-<processes>-<steps>-<rank>.pt` gets statistics, samples and weights.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin
from datasets import Dataset
from tests.lm import tiny
from tests.lm.ppo.run_distributed import GLOBAL_BATCH, global_batch
from tests.lm.sharded.run_ppo import gpt2, llama, lora, share
from tests.processes import let_accelerate_shard_on_cpu, process_of_many

from trimtab_lm import PPOConfig, PPOTrainer

MODELS = {"whole": gpt2, "cut": gpt2, "llama": llama, "lora": lora}
"""The model of a run, by the name of its folder."""


def make(folder: Path, world_size: int) -> PPOTrainer:
    """A tied policy, momentum, a scheduler, an adaptive coefficient and scaled scores: all that a checkpoint holds."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    policy = MODELS[folder.name]()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    config = PPOConfig(
        batch_size=GLOBAL_BATCH // world_size,
        mini_batch_size=GLOBAL_BATCH // world_size,
        ppo_epochs=2,
        target=0.5,
        horizon=40,
        use_score_scaling=True,
        output_dir=str(folder),
        save_steps=1,
        resume_with_changes=True,
        accelerator_kwargs={"fsdp_plugin": plugin} if world_size > 1 else {},
    )
    prompts = Dataset.from_dict({"input_ids": [row.tolist() for row in tiny.rows(20, 2, 6)]})
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    return PPOTrainer(config, policy, None, tiny.tokenizer(), prompts, optimizer=optimizer, lr_scheduler=scheduler)


def run(folder: Path, loop: str, steps: int, *, is_resumed: bool, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """Runs up to `steps`; returns what it logs after resuming, and its final weights."""
    trainer = make(folder, world_size)
    history: list[Any] = []
    samples: list[Any] = []
    if loop == "train":
        trainer.train(
            lambda queries, responses, **columns: [
                float(len(set(response))) + torch.rand(()).item() for response in responses
            ],
            generation_kwargs={"max_new_tokens": 6},
            steps=steps,
            resume_from="latest" if is_resumed else None,
            on_step=lambda step, stats, batch: (history.append(stats), samples.append(batch["response"])),
        )
    else:
        if is_resumed:
            trainer.load_checkpoint(folder / f"checkpoint-{steps - 1}")
        while trainer.steps_done < steps:
            columns = global_batch(trainer.steps_done, has_masks=True)
            history.append(trainer.step(**share(columns, rank, world_size)))
            trainer.save_checkpoint()
    trainer.save_pretrained(folder / f"policy-{world_size}-{steps}")
    weights = trainer.accelerator.get_state_dict(trainer.actor_critic)
    kept = {"kl_coef": trainer.kl_ctl.value, "samples": samples}
    return {"stats": history, "weights": {name: weight.clone() for name, weight in weights.items()}, **kept}


def main(*sessions: str) -> None:
    with process_of_many(let_accelerate_shard_on_cpu) as (rank, world_size):
        for session in sessions:
            name, loop, steps, resume = session.split(",")
            torch.manual_seed(rank if not resume else 100)  # a resumed session must not depend on its process's seed
            result = run(Path(name), loop, int(steps), is_resumed=bool(resume), rank=rank, world_size=world_size)
            torch.save(result, f"{name}/{loop}-{world_size}-{steps}-{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
