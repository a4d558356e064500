"""In a thousand steps with W&B, the memory, descriptors and bytes that a step costs do not grow."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from datasets import Dataset
from tests.diffusion import run_ddpo_distributed as diffusion
from tests.lm import tiny
from tests.lm.grpo import run_distributed as grpo
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

STEPS = 1000
MARKS = (200, 600, 1000)  # the first steps fill caches
MEMORY = 8 * 2**20  # bytes that the allocator may take in 400 steps

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("offline_wandb"),
]
AtStep = Callable[[int], None]


class Usage(NamedTuple):
    """Resources of this process, and bytes written by its tracker, at the end of a step."""

    resident: int
    descriptors: int
    written: int

    @classmethod
    def of(cls, folder: Path) -> "Usage":
        before, written = -1, bytes_in(folder)
        while written != before:  # W&B writes once a second, later on a busy machine
            time.sleep(2.5)
            before, written = written, bytes_in(folder)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), written)


def bytes_in(folder: Path) -> int:
    """Returns the size of a folder's files, some of which W&B links to others."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def ppo(folder: Path, at: AtStep) -> None:
    prompts = Dataset.from_dict({"input_ids": [row.tolist() for row in tiny.rows(24, 2, 5)]})
    options = {"log_with": "wandb", "project_kwargs": {"project_dir": str(folder)}, "steps": STEPS}
    trainer = tiny.ppo(arguments={"dataset": prompts}, **options)
    trainer.train(
        lambda queries, responses, **_: [float(len(set(text))) for text in responses],
        generation_kwargs={"max_new_tokens": 6},
        on_step=lambda step, *_: at(step),
    )
    trainer.tracker.finish()


class AtStepEnds(TrainerCallback):
    def __init__(self, at: AtStep):
        self.at = at

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self.at(state.global_step)


def grpo_train(folder: Path, at: AtStep) -> None:
    settings = {"report_to": ["wandb"], "logging_steps": 1, "max_steps": STEPS, "save_strategy": "no"}
    trainer = grpo.trainer(str(folder), **settings)
    trainer.add_callback(AtStepEnds(at))
    trainer.train()


def ddpo(folder: Path, at: AtStep) -> None:
    sizes = {"sample_num_batches_per_epoch": 1, "train_batch_size": 2, "train_gradient_accumulation_steps": 1}
    trainer = diffusion.trainer(str(folder), log_with="wandb", num_epochs=STEPS, sample_num_steps=2, **sizes)
    updates = 0
    for epoch in range(STEPS):
        updates = trainer.step(epoch, updates)
        at(epoch + 1)
    trainer.tracker.finish()


@pytest.mark.parametrize("train", [ppo, grpo_train, ddpo])
def test_memory_descriptors_and_bytes_per_step_are_flat(
    train: Callable[[Path, AtStep], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    usage: dict[int, Usage] = {}

    def at(step: int) -> None:
        if step in MARKS:
            usage[step] = Usage.of(tmp_path)

    train(tmp_path, at)
    first, middle, last = (usage[step] for step in MARKS)
    print(usage)
    assert last.resident - middle.resident < MEMORY
    assert last.descriptors <= first.descriptors
    early, late = middle.written - first.written, last.written - middle.written
    assert 0 < late < 1.05 * early
