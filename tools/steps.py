"""Prints how much code a reader of one step meets: its functions and files, and the lines of each trainer's class."""

from __future__ import annotations

import inspect
import os
import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from datasets import Dataset
from tests import test_every_trainer as small
from tests.diffusion import tiny as tiny_diffusion
from tests.lm import tiny

import trimtab_diffusion
import trimtab_lm
from trimtab_diffusion import DDPOConfig, DDPOStableDiffusionPipeline, DDPOTrainer
from trimtab_lm import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = f"{ROOT / 'packages'}{os.sep}"
TRAINERS = ("PPOTrainer", "IterativeSFTTrainer", "GRPOTrainer", "DPOTrainer", "RewardTrainer", "SFTTrainer")


class Trace:
    """The functions of the packages that run between `start` and `stop`, including comprehensions and lambdas."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()

    def start(self) -> None:
        """Begins to watch this thread."""
        sys.setprofile(self._see)

    def stop(self) -> None:
        """Stops watching."""
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGES) and code.co_name != "<module>":
            self.codes.add(code)

    def __str__(self) -> str:
        return f"{len(self.codes)} functions in {len({code.co_filename for code in self.codes})} files"


def ppo() -> Trace:
    """Traces PPO's second step, without generation."""
    trainer, trace = tiny.ppo(), Trace()
    trainer.step(*tiny.batch(trainer.config.batch_size))
    batch = tiny.batch(trainer.config.batch_size, seed=1)
    trace.start()
    trainer.step(*batch)
    trace.stop()
    return trace


def ddpo(folder: str) -> Trace:
    """Traces DDPO's second step, with sampling."""
    sizes = {"sample_num_steps": 3, "sample_batch_size": 4, "sample_num_batches_per_epoch": 1, "train_batch_size": 4}
    config = DDPOConfig(num_epochs=3, save_freq=100, mixed_precision="no", logdir=folder, log_with=None, **sizes)
    pipeline = DDPOStableDiffusionPipeline(tiny_diffusion.stable_diffusion())

    def brightness(images: Any, *_: Any) -> torch.Tensor:
        return torch.stack([torch.as_tensor(image).float().mean() for image in images])

    trainer, trace = DDPOTrainer(config, brightness, lambda: ("a cat", {}), pipeline), Trace()
    done = trainer.step(0, 0)
    trace.start()
    trainer.step(1, done)
    trace.stop()
    return trace


def on_transformers(trainer: Any) -> Trace:
    """Traces a trainer's second optimizer step, from the fetching of its batches."""
    trace, take, taken = Trace(), trainer.get_batch_samples, []

    def get_batch_samples(*args: Any, **kwargs: Any) -> Any:
        taken.append(None)
        trace.stop()
        if len(taken) == 2:
            trace.start()
        return take(*args, **kwargs)

    trainer.get_batch_samples = get_batch_samples
    trainer.train()
    trace.stop()
    return trace


def traces(folder: str) -> dict[str, Trace]:
    """Traces one step of the five trainers whose steps run the most code, on tiny models."""
    own = {"max_steps": 3, "logging_steps": 100, "gradient_checkpointing": False, "save_strategy": "no"}
    settings = small.SETTINGS | own
    texts, prompts = Dataset.from_dict({"text": small.WORDS}), Dataset.from_dict({"prompt": small.WORDS})
    sampling = {"num_generations": 4, "max_completion_length": 8, "beta": 0.04}
    model, more = tiny.gpt2(), {"processing_class": tiny.tokenizer()}
    grpo = GRPOConfig(folder, **settings, **sampling)
    dpo, sft = DPOConfig(folder, **settings), SFTConfig(folder, **settings)
    return {
        "PPO without generation": ppo(),
        "GRPO": on_transformers(GRPOTrainer(model, small.length, args=grpo, train_dataset=prompts, **more)),
        "DDPO": ddpo(folder),
        "DPO": on_transformers(DPOTrainer(model, args=dpo, train_dataset=small.PREFERENCES, **more)),
        "SFT": on_transformers(SFTTrainer(model, args=sft, train_dataset=texts, **more)),
    }


def class_lines(trainer: type) -> int:
    """Returns the number of lines in a class and in its bases that belong to the project."""
    own = [base for base in trainer.__mro__ if base.__module__.startswith("trimtab")]
    return sum(len(inspect.getsourcelines(base)[0]) for base in own)


def main() -> None:
    """Prints the figures, which are exact; tiny models take half a minute."""
    warnings.simplefilter("ignore")
    classes = [*(getattr(trimtab_lm, name) for name in TRAINERS), trimtab_diffusion.DDPOTrainer]
    print("lines of a class over its own bases:")
    print("  " + ", ".join(f"{kind.__name__} {class_lines(kind)}" for kind in classes))
    print("what one step runs:")
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):  # the trainers log to stdout
        steps = traces(folder)
    for name, trace in steps.items():
        print(f"  {name}: {trace}")


if __name__ == "__main__":
    main()
