"""Runs Diffusion-DPO on the same pairs however an update is divided; each process writes its weights into a folder."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tests.diffusion import tiny
from tests.processes import process_of_many
from torch import Tensor

from trimtab_diffusion import DDPOStableDiffusionPipeline, DiffusionDPOConfig, DiffusionDPOTrainer
from trimtab_diffusion.diffusion_dpo import algorithm
from trimtab_diffusion.trajectories import Trajectories

COUNT = 4  # pairs of an update, over all processes
KINDS = {"full": False, "lora": True}


def rows_of(count: int) -> list[dict[str, Any]]:
    """Pairs of which the chosen picture is red."""
    noise, red = tiny.generator(3), torch.tensor([0.7, 0.0, 0.0])[:, None, None]
    pictures = torch.rand(2, count, 3, 16, 16, generator=noise) * 0.3
    return [
        {"prompt": f"a cat {number}", "chosen": pictures[0, number] + red, "rejected": pictures[1, number]}
        for number in range(count)
    ]


@contextmanager
def same_noise() -> Iterator[None]:
    """Noise in the block depends on the pairs of a part alone, not on their order."""
    usual = algorithm.noised

    def noised(pictures: Trajectories, device: torch.device, rows: Tensor, _: object) -> algorithm.Noised:
        rows = rows.sort().values
        return usual(pictures, device, rows, tiny.generator(int(rows[0])))

    algorithm.noised = noised
    try:
        yield
    finally:
        algorithm.noised = usual


def run(kind: str, *, processes: int = 1) -> dict[str, Any]:
    """Two epochs of two updates, with noise that depends on the pair alone; returns weights and logs."""
    with tempfile.TemporaryDirectory() as folder, same_noise():
        config = DiffusionDPOConfig(
            logdir=folder,
            mixed_precision="no",
            train_gradient_accumulation_steps=COUNT // processes,
            train_max_grad_norm=1e-3,
        )
        with tiny.from_seed(1):
            pipeline = DDPOStableDiffusionPipeline(tiny.stable_diffusion(dtype=torch.float64), use_lora=KINDS[kind])
        trainer = DiffusionDPOTrainer(config, pipeline, rows_of(2 * COUNT))
        history = []
        for epoch in range(2):
            trainer.step(epoch, trainer.global_step)
            history.append({name: value for name, value in trainer.last_stats.items() if not name.startswith("time/")})
    weights = {name: weight.detach().clone() for name, weight in pipeline.denoiser.named_parameters()}
    return {"weights": weights, "history": history}


def main(folder: str) -> None:
    with process_of_many() as (number, processes):
        torch.save({kind: run(kind, processes=processes) for kind in KINDS}, f"{folder}/{number}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
