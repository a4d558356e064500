"""Runs DiffusionNFT on the same images however an epoch is divided; each process writes its weights into a folder."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tests.diffusion import tiny
from tests.processes import process_of_many
from torch import Tensor

from trimtab_common.stats import rank, world_size
from trimtab_diffusion import DDPOStableDiffusionPipeline, DiffusionNFTConfig, DiffusionNFTTrainer
from trimtab_diffusion.nft import algorithm
from trimtab_diffusion.trajectories import Pairs, Trajectories

COUNT, GROUP = 4, 2  # pictures of an epoch, over all processes, and of a prompt
KINDS = {"full": False, "lora": True}


def redness(images: Tensor, *_: object) -> Tensor:
    return images[:, 0].mean((1, 2)) - images[:, 2].mean((1, 2))


class Numbers:
    """A prompt function that numbers the groups of all processes."""

    def __init__(self) -> None:
        self.drawn = 0

    def __call__(self) -> tuple[str, None]:
        each = COUNT // GROUP // world_size()
        epoch, place = divmod(self.drawn, each)
        self.drawn += 1
        return f"a cat {(epoch * COUNT // GROUP + rank() * each + place) % 5}", None


class SameNoise(DiffusionNFTTrainer):
    """Draws a picture's noise from its number among those of all processes and epochs."""

    drawn = 0

    def sample(self, prompts: Sequence[str], generator: torch.Generator) -> tuple[Tensor, Trajectories]:
        each = COUNT // world_size()
        epoch, place = divmod(self.drawn, each)
        self.drawn += 1
        return super().sample(prompts, tiny.generator(epoch * COUNT + rank() * each + place))


@contextmanager
def same_noise() -> Iterator[None]:
    """In the block the noise of a part, which is one pair, depends on its picture and its level alone."""
    usual = algorithm.noised_pairs

    def noised(path: Trajectories, device: torch.device, rows: Tensor, steps: Tensor, _: object) -> Pairs:
        number = rank() * (COUNT // world_size()) + int(rows)
        return usual(path, device, rows, steps, tiny.generator(100 * number + int(steps)))

    algorithm.noised_pairs = noised
    try:
        yield
    finally:
        algorithm.noised_pairs = usual


def settings_of(folder: str, processes: int) -> dict[str, Any]:
    return {
        "logdir": folder,
        "mixed_precision": "no",
        "sample_num_steps": 3,
        "sample_batch_size": 1,
        "sample_num_batches_per_epoch": COUNT // processes,
        "group_size": GROUP,
        "train_batch_size": 1,
        "train_gradient_accumulation_steps": COUNT // processes,
        "train_max_grad_norm": 1e-3,
        "kl_coef": 0.1,
        "beta": 0.5,
        "old_decay_rate": 0.3,
    }


def run(kind: str, *, processes: int = 1) -> dict[str, Any]:
    """Two epochs of one update; returns the weights, those that sample, and what was logged."""
    with tempfile.TemporaryDirectory() as folder, same_noise():
        with tiny.from_seed(1):
            pipeline = DDPOStableDiffusionPipeline(tiny.stable_diffusion(dtype=torch.float64), use_lora=KINDS[kind])
        config = DiffusionNFTConfig(**settings_of(folder, processes))
        trainer = SameNoise(config, redness, Numbers(), pipeline)
        history = []
        for epoch in range(2):
            trainer.step(epoch, trainer.global_step)
            history.append({name: value for name, value in trainer.last_stats.items() if not name.startswith("time/")})
    weights = {name: weight.detach().clone() for name, weight in pipeline.denoiser.named_parameters()}
    return {"weights": weights, "old": trainer.old.weights, "history": history}


def main(folder: str) -> None:
    with process_of_many() as (number, processes):
        torch.save({kind: run(kind, processes=processes) for kind in KINDS}, f"{folder}/{number}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
