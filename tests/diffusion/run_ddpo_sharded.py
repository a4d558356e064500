"""Runs DDPO with weights, gradients and optimizer state divided among processes (FSDP2), under torchrun.

`folder,case,epochs,resume` trains a case up to `epochs`, from the latest checkpoint unless resume is empty.
`folder/<case>-<processes>-<epochs>-<rank>.pt` gets statistics and weights; in the case "bfloat16", predictions.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin
from tests.diffusion import modern, tiny
from tests.diffusion.run_ddpo_distributed import COUNT, SameSamples, Turns, brightness, config, weights
from tests.processes import let_accelerate_shard_on_cpu, process_of_many
from torch import Tensor
from torch.distributed.tensor import DTensor

from trimtab_diffusion import DDPOStableDiffusionPipeline
from trimtab_diffusion.trajectories import sampled_pairs

CALL = {"height": 16, "width": 16, "max_sequence_length": 16, "true_cfg_scale": 2.0}  # besides embedded guidance
CASES: dict[str, dict[str, Any]] = {
    "full": {"init_kl_coef": 0.5, "adap_kl_ctrl": True, "target": 1, "horizon": 20},
    "lora": {"init_kl_coef": 0.5},
    "checkpointing": {"train_gradient_checkpointing": True},
}

BFLOAT16 = "bfloat16"


def pipeline_of(case: str) -> DDPOStableDiffusionPipeline:
    with tiny.from_seed(1):  # adapters are random at the start
        return DDPOStableDiffusionPipeline(modern.flux(), use_lora=case == "lora", call_kwargs=CALL)


def share_of_samples(
    folder: Path, case: str, pipeline: DDPOStableDiffusionPipeline, world_size: int, **settings: Any
) -> SameSamples:
    """Returns a trainer that keeps this process's share of the samples."""
    share = COUNT // world_size
    sizes = {"sample_num_batches_per_epoch": share // 2, "train_batch_size": share // 2, "train_num_inner_epochs": 2}
    settings = sizes | {"train_max_grad_norm": 0.5} | CASES.get(case, {}) | settings
    return SameSamples(config(str(folder), **settings), brightness, Turns(), pipeline, other_rewards={})


def make(folder: Path, case: str, world_size: int, *, is_resumed: bool, precision: str = "no") -> SameSamples:
    """Returns a trainer, sharded if there are several processes."""
    plugin = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "reshard_after_forward": True}
    pipeline = pipeline_of(case)
    if precision == "no":
        pipeline.sd_pipeline.to(dtype=torch.float64)
    return share_of_samples(
        folder,
        case,
        pipeline,
        world_size,
        resume_from="latest" if is_resumed else "",
        resume_with_changes=True,
        mixed_precision=precision,
        accelerator_kwargs={"fsdp_plugin": FullyShardedDataParallelPlugin(**plugin)} if world_size > 1 else {},
    )


def run(folder: Path, case: str, epochs: int, *, is_resumed: bool = False, world_size: int = 1) -> dict[str, Any]:
    """Trains a case up to `epochs`; returns what it logs after resuming, its weights, and what this process holds."""
    trainer = make(folder, case, world_size, is_resumed=is_resumed)
    history = []
    for epoch in range(trainer.first_epoch, epochs):
        trainer.step(epoch, trainer.global_step)
        trainer.save_checkpoint()
        history.append(
            {name: value for name, value in trainer.last_stats.items() if not name.startswith(("time/", "memory/"))}
        )
    trainer.save_pretrained(folder / f"{case}-{world_size}-{epochs}")
    moments = [value for state in trainer.optimizer.state.values() for name, value in state.items() if name != "step"]
    return {
        "history": history,
        "weights": {name: whole(weight) for name, weight in weights(trainer).items()},
        "local": sum(map(local_size, trainer.model.parameters())),
        "moments": sum(map(local_size, moments)),
    }


def in_bfloat16(folder: Path, world_size: int) -> dict[str, Any]:
    """Returns mixed-precision predictions of policy and reference, and how much of the reference a process holds."""
    trainer = make(folder, "full", world_size, is_resumed=False, precision="bf16")
    path = trainer.draw(0).trajectories
    first = torch.zeros(1, dtype=torch.long)
    pairs = sampled_pairs(path, torch.device("cpu"), first, first)
    with torch.no_grad(), trainer.reference() as reference:
        predictions = {
            "policy": path.schedule.ask(trainer.model, pairs.latents, first, pairs.conditions),
            "reference": path.schedule.ask(reference, pairs.latents, first, pairs.conditions),
        }
    held = sum(map(local_size, reference.parameters()))
    return predictions | {"held": held, "size": sum(weight.numel() for weight in reference.parameters())}


def whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def local_size(tensor: Tensor) -> int:
    """Returns the number of a tensor's elements on this process."""
    return tensor.to_local().numel() if isinstance(tensor, DTensor) else tensor.numel()


def main(*sessions: str) -> None:
    with process_of_many(let_accelerate_shard_on_cpu) as (rank, world_size):
        for session in sessions:
            folder, case, epochs, resume = session.split(",")
            if case == BFLOAT16:
                result = in_bfloat16(Path(folder), world_size)
            else:
                result = run(Path(folder), case, int(epochs), is_resumed=bool(resume), world_size=world_size)
            torch.save(result, f"{folder}/{case}-{world_size}-{epochs}-{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
