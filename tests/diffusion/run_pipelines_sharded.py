"""Runs AlignProp and Diffusion-DPO with weights divided among processes (FSDP2), under torchrun or alone."""

import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin
from tests.diffusion import tiny
from tests.diffusion.run_alignprop_distributed import Numbers, SameNoise, redness
from tests.diffusion.run_ddpo_sharded import local_size, whole
from tests.diffusion.run_diffusion_dpo_distributed import rows_of, same_noise
from tests.processes import let_accelerate_shard_on_cpu, process_of_many

from trimtab_diffusion import (
    AlignPropConfig,
    DDPOStableDiffusionPipeline,
    DiffusionDPOConfig,
    DiffusionDPOTrainer,
)

COUNT = 4  # pictures or pairs of an update, over all processes


def alignprop(settings: dict[str, Any], pipeline: DDPOStableDiffusionPipeline) -> SameNoise:
    sampling = {"sample_num_steps": 3, "sample_guidance_scale": 3.0, "sample_eta": 0.7}
    fixed = {"truncated_backprop_rand": False, "truncated_backprop_timestep": 1}
    return SameNoise(AlignPropConfig(**settings, **sampling, **fixed), redness, Numbers(), pipeline)


def diffusion_dpo(settings: dict[str, Any], pipeline: DDPOStableDiffusionPipeline) -> DiffusionDPOTrainer:
    return DiffusionDPOTrainer(DiffusionDPOConfig(**settings), pipeline, rows_of(COUNT))


BUILD: dict[str, Callable[..., Any]] = {"alignprop": alignprop, "diffusion_dpo": diffusion_dpo}
CASES = [(name, use_lora) for name in BUILD for use_lora in (False, True)]


def run(name: str, *, use_lora: bool, processes: int = 1) -> dict[str, Any]:
    """Makes two updates; returns the weights, statistics, and how many numbers of weights this process holds."""
    plugin = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", "reshard_after_forward": True}
    with tempfile.TemporaryDirectory() as folder, same_noise():
        settings: dict[str, Any] = {
            "logdir": folder,
            "mixed_precision": "no",
            "train_gradient_accumulation_steps": COUNT // processes,
            "train_max_grad_norm": 1e-3,
            "accelerator_kwargs": {"fsdp_plugin": FullyShardedDataParallelPlugin(**plugin)} if processes > 1 else {},
        }
        with tiny.from_seed(1):
            pipeline = DDPOStableDiffusionPipeline(tiny.stable_diffusion_3(dtype=torch.float64), use_lora=use_lora)
        trainer = BUILD[name](settings, pipeline)
        history = []
        for epoch in range(2):
            trainer.step(epoch, trainer.global_step)
            history.append({key: value for key, value in trainer.last_stats.items() if not key.startswith("time/")})
        trainer.save_pretrained(f"{folder}/model")
    weights = {key: whole(weight).detach().clone() for key, weight in trainer.model.named_parameters()}
    return {"weights": weights, "history": history, "local": sum(map(local_size, trainer.model.parameters()))}


def main(folder: str) -> None:
    with process_of_many(let_accelerate_shard_on_cpu) as (number, processes):
        results = {f"{name}-{lora}": run(name, use_lora=lora, processes=processes) for name, lora in CASES}
        torch.save(results, f"{folder}/{number}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
