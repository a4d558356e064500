"""Runs sessions of small PPO trainings, killed at a chosen place or finished; each resumes the newest checkpoint.

A session is `folder,loop,tracker,kill`: loop is train or own, kill is end or place:number. Each of several sessions has
its own process. `folder/steps-<rank>.jsonl` gets a line per step, `folder/final-<rank>.pt` the weights.
"""

import gc
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
from datasets import Dataset
from tests.lm import tiny

from trimtab_common import checkpoint, sealing, set_seed
from trimtab_common.sealing import latest_checkpoint
from trimtab_lm import LengthSampler, PPOConfig, PPOTrainer

STEPS, SAVE_EVERY, RESPONSES = 7, 2, 4
SAMPLING = {"max_new_tokens": 6, "do_sample": True}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def noise() -> float:
    """Returns a random number that depends on every library's global generator."""
    return random.random() + random.gauss(0, 0.1) + np.random.rand() + torch.rand(()).item()


class Session:
    """A run in `folder` that dies at the `at`-th `place`, if there is one."""

    def __init__(self, folder: str, loop: str, tracker: str, kill: str):
        self.folder, self.loop = Path(folder), loop
        self.place, _, at = kill.partition(":")
        self.at, self.operations = int(at or 0), 0
        set_seed(os.getpid())  # a resumed session must not depend on the seed of its process
        if not self.folder.exists() or not latest_checkpoint(self.folder):
            set_seed(11)
        self.trainer = self.make(tracker)
        self.trainer.optimizer.optimizer.register_step_post_hook(lambda *_: self.reached("update", last=False))
        if self.place == "save":
            self.count_file_operations()

    def make(self, tracker: str) -> PPOTrainer:
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        config = PPOConfig(
            batch_size=RESPONSES // world_size,
            mini_batch_size=1,
            gradient_accumulation_steps=1,
            ppo_epochs=2,
            target=0.5,
            horizon=40,
            use_score_scaling=True,
            use_score_norm=True,
            whiten_rewards=True,
            seed=3,
            steps=STEPS,
            save_steps=SAVE_EVERY,
            save_total_limit=1,
            output_dir=str(self.folder),
            log_with=tracker,
            project_kwargs={"project_dir": str(self.folder)},
            accelerator_kwargs={"cpu": True},
        )
        policy = tiny.policy()
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        prompts = Dataset.from_dict({"input_ids": [row.tolist() for row in tiny.rows(14, 2, 6)]})
        tokenizer = tiny.tokenizer()
        return PPOTrainer(config, policy, None, tokenizer, prompts, optimizer=optimizer, lr_scheduler=scheduler)

    def reached(self, place: str, *, last: bool = True) -> None:
        """Kills the run at its `at`-th visit to the place. last: whether the step is over and already counted."""
        if place == self.place and self.at == self.trainer.steps_done + (0 if last else 1):
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

    def score(self, texts: list[str]) -> list[float]:
        self.reached("reward", last=False)
        return [len(set(text)) / 4 + noise() for text in texts]

    def note(self, step: int, stats: dict[str, Any], prompts: list[torch.Tensor]) -> None:
        """Writes everything in which an uninterrupted run must agree."""
        numbers = {
            name: value.tolist() if isinstance(value, torch.Tensor) else value
            for name, value in stats.items()
            if not name.startswith("time/")
        }
        line = {
            "step": step,
            "stats": numbers,
            "prompts": [row.tolist() for row in prompts],
            "kl_coef": self.trainer.kl_ctl.value,
            "run_id": self.trainer.run.tracker_id,
        }
        self.folder.mkdir(exist_ok=True)
        with (self.folder / f"steps-{self.trainer.accelerator.process_index}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.reached("on_step")

    def run(self) -> None:
        self.run_train() if self.loop == "train" else self.run_own()
        weights = self.trainer.accelerator.unwrap_model(self.trainer.actor_critic).state_dict()
        rank = self.trainer.accelerator.process_index
        torch.save(weights, self.folder / f"final-{rank}.pt")
        self.trainer.tracker.finish()
        self.trainer.accelerator.end_training()

    def run_train(self) -> None:
        self.trainer.train(
            lambda queries, responses, **columns: self.score(responses),
            generation_kwargs=SAMPLING,
            resume_from="latest",
            on_step=lambda step, stats, batch: self.note(step, stats, batch["input_ids"]),
        )

    def run_own(self) -> None:
        trainer, lengths = self.trainer, LengthSampler(2, 9)
        if newest := latest_checkpoint(self.folder):
            trainer.load_checkpoint(newest)
        while trainer.steps_done < STEPS:
            for batch in trainer.dataloader:
                queries = batch["input_ids"]
                responses = trainer.generate(queries, lengths, return_prompt=False, do_sample=True)
                stats = trainer.step(queries, responses, self.score(trainer.tokenizer.batch_decode(responses)))
                self.note(trainer.steps_done, stats, queries)
                if trainer.steps_done % SAVE_EVERY == 0:
                    trainer.save_checkpoint(self.folder)
                if trainer.steps_done == STEPS:
                    break


def main(sessions: list[str]) -> None:
    torch.set_num_threads(1)
    if len(sessions) == 1:
        Session(*sessions[0].split(",")).run()
        gc.collect()  # the trainer and with it DDP, whose group's threads may abort a process that exits
        return
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
