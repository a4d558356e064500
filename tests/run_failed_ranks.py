"""Runs trainers on two processes, one of which fails in its second step: `trainer failure rank`."""

import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from tests.lm import tiny
from tests.lm.grpo import run_distributed as grpo

from trimtab_lm import SFTConfig, SFTTrainer

REWARD_LIMIT = 4.0  # seconds
LEAVES_WITH = 3  # exit status
FAILING_STEP = 2


def no_answer() -> None:
    raise ValueError("no answer from the judge")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(LEAVES_WITH)


def wait_forever() -> None:
    time.sleep(600)


FAILURES = {"raises": no_answer, "dies": kill, "exits": leave, "sleeps": wait_forever}
LIMITS = {"reward_timeout": REWARD_LIMIT}


class FailingReward:
    """A reward that fails in the second step of one process."""

    def __init__(self, fail: Callable[[], None]):
        self.fail, self.calls = fail, 0

    def __call__(self) -> float:
        self.calls += 1
        if self.calls == FAILING_STEP:
            self.fail()
        return 0.0


def nothing() -> None:
    """Lets the process live."""


def ppo_loop(reward: FailingReward, folder: str) -> None:
    """Loops over `step`, as a caller does."""
    trainer = tiny.ppo()
    for _ in range(3):
        queries = tiny.rows(4, 2, 5)
        responses = trainer.generate(queries, return_prompt=False, max_new_tokens=4)
        trainer.step(queries, responses, [reward()] * 4)


def ppo_train(reward: FailingReward, folder: str) -> None:
    prompts = Dataset.from_dict({"input_ids": [row.tolist() for row in tiny.rows(24, 2, 5)]})
    trainer = tiny.ppo(arguments={"dataset": prompts}, steps=3, **LIMITS)
    trainer.train(lambda completions, **_: [reward()] * len(completions), generation_kwargs={"max_new_tokens": 4})


def grpo_train(reward: FailingReward, folder: str) -> None:
    def score(completions: list[str], **_: Any) -> list[float]:
        failing = reward()
        return [failing + len(text) for text in completions]

    grpo.trainer(folder, reward=score, max_steps=3, **LIMITS).train()


def ddpo_train(reward: FailingReward, folder: str, **options: bool) -> None:
    from tests.diffusion import run_ddpo_distributed as diffusion  # imports diffusers, which the others do without

    def score(images: torch.Tensor, *_: Any) -> torch.Tensor:
        return images.mean((1, 2, 3)) + reward()

    sizes = {"sample_num_batches_per_epoch": 1, "train_batch_size": 2, "train_gradient_accumulation_steps": 1}
    diffusion.trainer(folder, reward=score, num_epochs=3, save_freq=9, **LIMITS, **sizes, **options).train()


def ddpo_threads(reward: FailingReward, folder: str) -> None:
    """Computes rewards in threads during sampling."""
    ddpo_train(reward, folder, async_reward_computation=True)


def sft_data(reward: FailingReward, folder: str) -> None:
    """Prepares data in the main process; the other process waits for it in the constructor."""

    def formatting_func(row: dict[str, str]) -> str:
        reward()
        return row["text"]

    config = SFTConfig(folder, report_to="none", use_cpu=True)
    texts = Dataset.from_dict({"text": ["ab", "cd", "ef"]})
    data = {"train_dataset": texts, "formatting_func": formatting_func}
    SFTTrainer(tiny.gpt2(), config, processing_class=tiny.tokenizer(), **data)


TRAINERS = {each.__name__: each for each in (ppo_loop, ppo_train, grpo_train, ddpo_train, ddpo_threads, sft_data)}


def main(name: str, failure: str, rank: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    reward = FailingReward(FAILURES[failure] if rank == os.environ["RANK"] else nothing)
    with tempfile.TemporaryDirectory() as folder:
        TRAINERS[name](reward, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
