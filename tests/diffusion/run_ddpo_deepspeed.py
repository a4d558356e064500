"""Runs DDPO under DeepSpeed ZeRO-2 and ZeRO-3, with torchrun and the environment of `make test-deepspeed`.

`folder,case,stage`: two epochs of a case. Statistics and weights go to folder/<case>-<stage>-<rank>.pt.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import DeepSpeedPlugin
from accelerate.state import AcceleratorState
from tests.diffusion.run_ddpo_distributed import SameSamples
from tests.diffusion.run_ddpo_sharded import pipeline_of, share_of_samples
from tests.lm.sharded.run_deepspeed import let_accelerate_use_gloo, share, under_deepspeed
from tests.processes import process_of_many
from torch import Tensor

from trimtab_common.sharding import whole_weights

STAGES = (2, 3)
REFUSED = "refused"  # a training with checkpoints


def make(folder: Path, case: str, stage: int | None, world_size: int) -> SameSamples:
    """Returns a trainer under a ZeRO stage, or without an engine."""
    AcceleratorState._reset_state(reset_partial_state=stage is not None)
    engine: dict[str, Any] = {"cpu": True}
    if stage is not None:
        engine = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=under_deepspeed(stage)["deepspeed"]), "cpu": False}
    return share_of_samples(
        folder,
        case,
        pipeline_of(case),
        world_size,
        accelerator_kwargs=engine,
        save_freq=2 if case == REFUSED else 100,
        num_epochs=2,
    )


def first_weights(case: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights before training, by name."""
    return pipeline_of(case).denoiser.named_parameters()


def run(folder: Path, case: str, stage: int | None = None, world_size: int = 1) -> dict[str, Any]:
    """Returns what two epochs log, the weights after them, and how much of the weights this process holds."""
    trainer = make(folder, case, stage, world_size)
    denoiser = trainer.sd_pipeline.denoiser
    history = trainer.train()
    trainer.save_pretrained(folder / f"{case}-{stage}")
    held = share(denoiser)
    with whole_weights(denoiser):
        weights = {name: weight.detach().clone() for name, weight in denoiser.named_parameters()}
    untimed = [{k: v for k, v in stats.items() if not k.startswith(("time/", "memory/"))} for stats in history]
    return {"history": untimed, "weights": weights, "held": held}


def main(*sessions: str) -> None:
    with process_of_many(let_accelerate_use_gloo) as (rank, world_size):
        for session in sessions:
            folder, case, stage = session.split(",")
            if case != REFUSED:
                torch.save(run(Path(folder), case, int(stage), world_size), f"{folder}/{case}-{stage}-{rank}.pt")
                continue
            try:
                make(Path(folder), case, int(stage), world_size).train()
            except ValueError as error:
                Path(f"{folder}/{case}-{stage}-{rank}.txt").write_text(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
