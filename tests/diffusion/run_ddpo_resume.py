"""Runs sessions of small DDPO trainings, killed at a chosen place or finished; each resumes the newest checkpoint.

A session is `folder,kind,tracker,kill`: kind is lora or full, kill is end or place:number. Each of several sessions
has its own process. `folder/epochs.jsonl` gets a line per epoch, `folder/final.pt` the state after the last one.
"""

import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.diffusion import tiny

from trimtab_common import checkpoint, sealing, set_seed
from trimtab_common.sealing import latest_checkpoint
from trimtab_diffusion import DDPOConfig, DDPOStableDiffusionPipeline, DDPOTrainer

EPOCHS, SAVE_EVERY = 5, 2
WORDS = ("cat", "dog", "red fox", "two owls")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def noise() -> float:
    """Returns a random number that depends on every library's global generator."""
    return random.random() + random.gauss(0, 0.1) + np.random.rand() + torch.rand(()).item()


def random_prompt() -> tuple[str, dict[str, Any]]:
    return random.choice(WORDS[:2]), {}


class InTurn:
    """A prompt function with a state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> tuple[str, dict[str, Any]]:
        self.calls += 1
        return WORDS[self.calls % 3], {"call": self.calls}

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Session:
    """A run in `folder` that dies at the `at`-th `place`, if there is one."""

    def __init__(self, folder: str, kind: str, tracker: str, kill: str):
        self.folder, self.kind = Path(folder), kind
        self.place, _, at = kill.partition(":")
        self.at, self.operations, self.since_epoch = int(at or 0), 0, 0
        self.asked: list[str] = []
        set_seed(os.getpid())  # a resumed session must not depend on the seed of its process
        if not latest_checkpoint(self.folder / "checkpoints"):
            set_seed(11)
        self.trainer = self.make(tracker)
        self.trainer.optimizer.optimizer.register_step_post_hook(lambda *_: self.reached("update"))
        if self.place == "save":
            self.count_file_operations()

    def make(self, tracker: str) -> DDPOTrainer:
        """Builds one of two kinds, which differ in trainable weights, prompts, measure, KL and limits."""
        is_lora = self.kind == "lora"
        different: dict[str, Any] = (
            {
                "per_prompt_stat_tracking": True,
                "per_prompt_stat_tracking_buffer_size": 5,
                "per_prompt_stat_tracking_min_count": 3,
                "num_checkpoint_limit": 1,
                "project_kwargs": {"project_dir": str(self.folder)},
            }
            if is_lora
            else {
                "init_kl_coef": 0.1,
                "adap_kl_ctrl": True,
                "target": 0.01,
                "horizon": 20,
                "group_size": 2,
                "train_warmup_steps": 30,
                "num_checkpoint_limit": 4,
                "project_kwargs": {"project_dir": str(self.folder), "total_limit": 1},
            }
        )
        config = DDPOConfig(
            seed=3,
            num_epochs=EPOCHS,
            save_freq=SAVE_EVERY,
            resume_from="latest",
            logdir=str(self.folder / "logs"),
            log_with=tracker,
            mixed_precision="no",
            sample_num_steps=4,
            sample_guidance_scale=3.0,
            sample_batch_size=2,
            sample_num_batches_per_epoch=2,
            train_batch_size=2,
            train_num_inner_epochs=2,
            train_timestep_fraction=0.5,
            train_learning_rate=3e-3,
            train_clip_range=1e-2,
            **different,
        )
        pipeline = DDPOStableDiffusionPipeline(tiny.stable_diffusion(), use_lora=is_lora)
        prompts = random_prompt if is_lora else InTurn()
        return DDPOTrainer(config, self.score, prompts, pipeline, self.hook)

    def reached(self, place: str) -> None:
        """Kills the run at its `at`-th visit to the place, counting updates or epochs of the whole run."""
        done = self.trainer.first_epoch
        if place == "update":  # the trainer counts at the end of an epoch
            done, self.since_epoch = self.trainer.global_step + self.since_epoch, self.since_epoch + 1
        if place == self.place and self.at == done + 1:
            die()

    def count_file_operations(self) -> None:
        def dying(operation: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.operations += 1
                if self.operations == self.at:
                    if operation is rmtree:  # half removed
                        next(file for file in Path(args[0]).iterdir()).unlink()
                    die()
                return operation(*args, **kwargs)

            return call

        rmtree = shutil.rmtree
        for module, name in (
            (shutil, "rmtree"),
            (os, "rename"),
            (torch, "save"),
            (checkpoint, "save_file"),
            (sealing, "_fsync"),
        ):
            setattr(module, name, dying(getattr(module, name)))

    def score(self, images: torch.Tensor, prompts: tuple[str, ...], metadata: tuple[Any, ...]) -> torch.Tensor:
        self.reached("reward")
        self.asked += prompts
        return images.mean((1, 2, 3)) + torch.tensor([0.1 * noise() for _ in prompts])

    def hook(self, *_: Any) -> None:
        self.reached("hook")

    def run(self) -> None:
        """Runs `train`, or a caller's loop for full training; writes a line per epoch before any kill in a save."""
        stock = self.trainer.step

        def step(epoch: int, global_step: int) -> int:
            self.since_epoch = 0
            steps = stock(epoch, global_step)
            self.note(epoch)
            return steps

        self.trainer.step = step  # type: ignore[method-assign]
        if self.kind == "lora":
            self.trainer.train()
        else:
            for epoch in range(self.trainer.first_epoch, EPOCHS):
                step(epoch, self.trainer.global_step)
                if (epoch + 1) % SAVE_EVERY == 0:
                    self.trainer.save_checkpoint()
        torch.save(self.left(), self.folder / "final.pt")
        self.trainer.tracker.finish()
        self.trainer.accelerator.end_training()

    def note(self, epoch: int) -> None:
        """Writes everything in which an uninterrupted run must agree."""
        stats = {
            name: value
            for name, value in self.trainer.last_stats.items()
            if not name.startswith(("time/", "selfcheck/"))
        }  # each process checks itself in its first epoch
        line = {
            "epoch": epoch,
            "stats": stats,
            "prompts": self.asked,
            "updates": self.trainer.global_step,
            "run_id": self.trainer.run_id,
        }
        self.asked = []
        with (self.folder / "epochs.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self.place == "epoch" and self.at == epoch + 1:
            die()

    def left(self) -> dict[str, Any]:
        trainer = self.trainer
        return {
            "weights": trainer.accelerator.unwrap_model(trainer.model).state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "lr_scheduler": trainer.lr_scheduler.state_dict(),
            "prompt_stats": trainer.prompt_stats and trainer.prompt_stats.state_dict(),
            "kl_coef": trainer.kl_ctl.value,
            "queries": trainer.queries,
            "next": noise(),
        }


def main(sessions: list[str]) -> None:
    torch.set_num_threads(1)
    for session in sessions:
        Path(session.partition(",")[0]).mkdir(parents=True, exist_ok=True)
    if len(sessions) == 1:
        return Session(*sessions[0].split(",")).run()
    for session in sessions:
        child = os.fork()
        if not child:
            Session(*session.split(",")).run()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        should_die = not session.endswith("end")
        if os.WIFSIGNALED(status) != should_die or (not should_die and status):
            raise RuntimeError(f"{session} ended with status {status}")


if __name__ == "__main__":
    main(sys.argv[1:])
