"""Runs AlignProp on the same images however an update is divided; each process writes its weights into a folder."""

import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from tests.diffusion import tiny
from tests.processes import process_of_many

from trimtab_common.stats import rank, world_size
from trimtab_diffusion import AlignPropConfig, AlignPropTrainer

COUNT = 4  # pictures of an update, over all processes
CASES: dict[str, dict[str, Any]] = {
    "two steps": {"truncated_backprop_timestep": 1},
    "low variance": {"truncated_backprop_timestep": 2, "low_variance_samples": 2},
}


def redness(images: torch.Tensor, *_: object) -> torch.Tensor:
    return (images[:, 0] - images[:, 2]).square().mean((1, 2))


class Numbers:
    """A prompt function that numbers the pictures of all processes."""

    def __init__(self) -> None:
        self.drawn = 0

    def __call__(self) -> tuple[str, int]:
        each = COUNT // world_size()
        update, place = divmod(self.drawn, each)
        self.drawn += 1
        number = update * COUNT + rank() * each + place
        return f"a cat {number}", number


class SameNoise(AlignPropTrainer):
    """Draws a picture's noise from its number."""

    def draw(self, prompts: Sequence[tuple[str, Any]], first: int, generator: torch.Generator) -> dict[str, Any]:
        ((_, number),) = prompts
        return super().draw(prompts, first, tiny.generator(number))


def run(name: str, *, processes: int = 1) -> dict[str, Any]:
    """Makes two updates; returns the weights and what was logged."""
    with tempfile.TemporaryDirectory() as folder:
        config = AlignPropConfig(
            logdir=folder,
            mixed_precision="no",
            sample_num_steps=3,
            sample_guidance_scale=3.0,
            train_gradient_accumulation_steps=COUNT // processes,
            train_max_grad_norm=1e-3,
            truncated_backprop_rand=False,
            **CASES[name],
        )
        trainer = SameNoise(config, redness, Numbers(), tiny.stable_diffusion(dtype=torch.float64))
        history = []
        for epoch in range(2):
            trainer.step(epoch, trainer.global_step)
            history.append({key: trainer.last_stats[key] for key in ("reward_mean", "reward_std", "grad_norm")})
    return {"weights": {k: v.detach().clone() for k, v in trainer.model.named_parameters()}, "history": history}


def main(folder: str) -> None:
    with process_of_many() as (number, processes):
        torch.save({name: run(name, processes=processes) for name in CASES}, f"{folder}/{number}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
