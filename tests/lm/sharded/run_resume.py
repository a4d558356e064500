"""Runs sharded trainings that stop, save and continue, under torchrun: `folder,name:start:stop,...`.

`name:start:stop` is a session of the run `name`, for each case and checkpoint format of RUNS: from the checkpoint of
step `start`, or anew at 0, until step `stop`. Each session saves its full weights in folder/<name>-<stop>.pt.
"""

import sys
from pathlib import Path

import torch
from tests.lm.hf.run_distributed import Stop
from tests.lm.sharded.run_trainers import CASES, train
from tests.processes import let_accelerate_shard_on_cpu, process_of_many
from torch.distributed.checkpoint import FileSystemReader

from trimtab_common.sealing import verify

FULL, SHARDED = "FULL_STATE_DICT", "SHARDED_STATE_DICT"
RUNS = {f"{case} {SHARDED}": (case, SHARDED) for case in ("sft", "reward", "dpo adapters", "grpo", "iterative sft")}
RUNS |= {f"{case} {FULL}": (case, FULL) for case in ("sft", "dpo adapters")}


def went_on(run: Path, case: str, format: str, start: int, stop: int, world_size: int) -> dict[str, torch.Tensor]:
    """Runs a session to a complete checkpoint, saves the model in <run>-model, and returns the weights."""
    more = {"save_strategy": "steps", "save_steps": 1, "resume_with_changes": True}
    if case == "grpo":
        more["num_iterations"] = 1  # another number of processes cannot divide the rest of a rollout
    trainer = CASES[case](str(run), world_size, state_dict_type=format, **more)
    trainer.add_callback(Stop(stop))
    train(trainer, resume=start > 0)
    newest = run / f"checkpoint-{stop}"
    verify(newest)
    if format == SHARDED:
        stored = FileSystemReader(newest / "pytorch_model_fsdp_0").read_metadata().state_dict_metadata
        assert max(len(weight.chunks) for weight in stored.values()) == world_size
    trainer.save_model(f"{run}-model")
    return {name: weight.clone() for name, weight in trainer.accelerator.get_state_dict(trainer.model).items()}


def main(folder: str, *sessions: str) -> None:
    with process_of_many(let_accelerate_shard_on_cpu) as (rank, world_size):
        for name, start, stop in (session.split(":") for session in sessions):
            weights = {
                run: went_on(Path(folder, f"{name} {run}"), case, format, int(start), int(stop), world_size)
                for run, (case, format) in RUNS.items()
            }
            if rank == 0:
                torch.save(weights, f"{folder}/{name}-{stop}.pt")


if __name__ == "__main__":
    main(*sys.argv[1].split(","))
