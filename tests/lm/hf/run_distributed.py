"""A run of two processes that stops in the middle and resumes: `folder,trainer,steps`, under torchrun."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lm.hf.run_resume import make
from tests.processes import process_of_many
from transformers import TrainerCallback

from trimtab_common.sealing import CheckpointError, latest_checkpoint


class Stop(TrainerCallback):
    def __init__(self, at: int):
        self.at = at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self.at


def run(folder: Path, name: str, steps: int) -> None:
    trainer = make(name, folder, per_device_train_batch_size=1)
    trainer.add_callback(Stop(steps))
    resumes = folder.exists() and latest_checkpoint(folder) is not None
    if resumes:  # every process rejects a new run, so none waits for another
        with pytest.raises(CheckpointError, match="of another run"):
            trainer.train()
        trainer = make(name, folder, per_device_train_batch_size=1)
    trainer.train(resume_from_checkpoint=resumes)
    if trainer.is_world_process_zero():
        torch.save(trainer.accelerator.unwrap_model(trainer.model).state_dict(), folder / "final.pt")


if __name__ == "__main__":
    folder, name, steps = sys.argv[1].split(",")
    with process_of_many():
        run(Path(folder), name, int(steps))
