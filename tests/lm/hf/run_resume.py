"""Runs sessions of small trainings on transformers.Trainer, killed at a file operation or finished.

A session is `folder,trainer,kill`: kill is the number of the file operation at which the process dies, or 0.
Each has its own process, and resumes the last complete checkpoint in its folder. `folder/final.pt` gets the
weights, `folder/history.json` what was logged.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tests.lm import tiny
from transformers import PreTrainedModel, TrainerCallback, TrainerState
from transformers.trainer_utils import get_last_checkpoint

from trimtab_common import set_seed
from trimtab_lm import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    IterativeSFTConfig,
    IterativeSFTTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

STEPS = 4
TEXTS = ["hello world.", "abc.", "a longer text than the others.", "x y z.", "no.", "some more words."]
PAIRS = Dataset.from_dict(
    {
        "prompt": [text[:2] for text in TEXTS],
        "chosen": [text[2:] for text in TEXTS],
        "rejected": [text[3:] + "!" for text in TEXTS],
    }
)


def make(name: str, folder: Path, *, eval_texts: Sequence[str] = (), **more: Any) -> Any:
    """Returns a trainer of the kind `name` that saves at each of its few steps. eval_texts: for the kind sft."""
    settings: dict[str, Any] = {
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "steps",
        "save_steps": 1,
        "logging_steps": 1,
        "max_steps": STEPS,
        "save_total_limit": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
    } | more
    text = Dataset.from_dict({"text": TEXTS})
    set_seed(3)
    if name == "sft":
        return SFTTrainer(
            tiny.gpt2(resid_pdrop=0.3),
            SFTConfig(str(folder), **settings),
            train_dataset=text,
            eval_dataset=Dataset.from_dict({"text": eval_texts}) if eval_texts else None,
            processing_class=tiny.tokenizer(),
        )
    if name == "dpo":
        return DPOTrainer(
            tiny.gpt2(), args=DPOConfig(str(folder), **settings), train_dataset=PAIRS, processing_class=tiny.tokenizer()
        )
    if name == "reward":
        return RewardTrainer(
            tiny.scorer(), RewardConfig(str(folder), **settings), train_dataset=PAIRS, processing_class=tiny.tokenizer()
        )
    if name == "grpo":
        config = GRPOConfig(str(folder), num_generations=2, max_completion_length=4, steps_per_generation=2, **settings)
        return GRPOTrainer(
            tiny.gpt2(),
            lambda completions, **_: [float(len(text)) for text in completions],
            config,
            train_dataset=PAIRS.select_columns("prompt"),
            processing_class=tiny.tokenizer(),
        )
    return IterativeSFTTrainer(
        tiny.gpt2(resid_pdrop=0.3), IterativeSFTConfig(str(folder), **settings), processing_class=tiny.tokenizer()
    )


def run(trainer: Any, *, resume: str | bool | None) -> None:
    """Trains to the end, from a checkpoint if one is named."""
    if not isinstance(trainer, IterativeSFTTrainer):
        trainer.train(resume_from_checkpoint=resume)
        return
    if resume:
        trainer.train(resume_from_checkpoint=resume)
    for call in range(trainer.progress.calls, STEPS // 2):  # each is two optimizer steps
        trainer.step(texts=[text + "abcd"[call] for text in TEXTS[:4]])


class Dies(TrainerCallback):
    """Kills the process at the `at`-th file operation after training began."""

    def __init__(self, at: int):
        self.at, self.count = at, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for owner, name in (
            (os, "fsync"),
            (os, "rename"),
            (shutil, "rmtree"),
            (torch, "save"),
            (Path, "mkdir"),
            (Path, "touch"),
            (PreTrainedModel, "save_pretrained"),
            (TrainerState, "save_to_json"),
        ):
            setattr(owner, name, self.counted(getattr(owner, name)))

    def counted(self, operation: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return call


def session(folder: Path, name: str, kill: int) -> None:
    trainer = make(name, folder)
    set_seed(os.getpid())  # a resumed session must not depend on the seed of its process
    newest = get_last_checkpoint(str(folder)) if folder.exists() else None  # as most programs do
    if newest is None:
        set_seed(11)
    if kill:
        trainer.add_callback(Dies(kill))
    run(trainer, resume=newest)
    torch.save(trainer.model.state_dict(), folder / "final.pt")
    history = [
        {name: value for name, value in line.items() if "time" not in name and "per_second" not in name}
        for line in trainer.state.log_history
        if "loss" in line
    ]
    (folder / "history.json").write_text(json.dumps(history))


def main(sessions: list[str]) -> None:
    torch.set_num_threads(1)
    for text in sessions:
        folder, name, kill = text.split(",")
        child = os.fork()
        if not child:
            session(Path(folder), name, int(kill))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) != (kill != "0") or (kill == "0" and status):
            raise RuntimeError(f"{text} ended with status {status}")


if __name__ == "__main__":
    main(sys.argv[1:])
