"""Runs trainers on two processes, one of which has nothing to learn from; each writes its results into the folder.

The other trainers reject such work: rows without labels (SFT, IterativeSFT), fully masked responses (PPO).
"""

import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from tests.diffusion import run_ddpo_distributed as ddpo
from tests.diffusion import tiny as tiny_diffusion
from tests.lm import tiny
from tests.lm.dpo import run_training as dpo
from tests.lm.grpo import run_distributed as grpo
from tests.lm.reward import run_distributed as reward
from tests.processes import process_of_many

Result = dict[str, Any]


@contextmanager
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield name


class CutForSome(grpo.Scripted):
    """Completes prompts as they say; for the third and fourth of every four prompts, completions never end."""

    def generate(self, prompts: Any, **options: Any) -> Any:
        rollout = super().generate(prompts, **options)
        texts = grpo.prompts(8)["prompt"]
        endless = [tiny.tokenizer()(text)["input_ids"] for i, text in enumerate(texts) if i % 4 > 1]
        ends = [prompt.tolist() not in endless for prompt in prompts for _ in range(options["num_generations"])]
        return rollout._replace(ended=ends)


def grpo_masked(processes: int) -> Result:
    """Two prompts per process and step; process 1's completions are all truncated and masked. Alone: process 0's."""
    kept = [i for i in range(8) if processes == 2 or i % 4 < 2]
    data = grpo.prompts(8).select(kept)
    with folder() as name:
        trainer = grpo.trainer(
            name,
            tiny.gpt2(dtype=torch.float64),
            rollout=CutForSome(),
            train_dataset=data,
            shuffle_dataset=False,
            max_steps=2,
            beta=0.2,
            mask_truncated_completions=True,
        )
        trainer.train()
    return {"weights": tiny.weights(trainer.model), "loss": [log["loss"] for log in trainer.state.log_history[:2]]}


class NoSignal(ddpo.SameSamples):
    """Gives all images in the second half of an epoch, which process 1 draws, the same reward."""

    def draw(self, epoch: int) -> Any:
        samples = super().draw(epoch)
        first = len(samples.rewards) * self.accelerator.process_index
        numbers = torch.arange(first, first + len(samples.rewards))
        return replace(samples, rewards=torch.where(numbers < ddpo.COUNT // 2, samples.rewards, 0.25))


def ddpo_without_signal(processes: int) -> Result:
    """Process 1's advantages are 0, because its groups have equal rewards."""
    each = ddpo.COUNT // processes
    with folder() as name:
        settings = ddpo.config(
            name,
            sample_num_batches_per_epoch=each // 2,
            train_batch_size=each // 2,
            train_max_grad_norm=0.5,
            group_size=2,
            train_num_inner_epochs=2,
        )
        pipeline = tiny_diffusion.stable_diffusion(dtype=torch.float64)
        trainer = NoSignal(settings, ddpo.brightness, ddpo.Turns(), pipeline, other_rewards={})
        history = []
        for epoch in range(2):
            trainer.step(epoch, trainer.global_step)
            history.append(trainer.last_stats["loss"])
    return {"weights": ddpo.weights(trainer), "loss": history}


def dpo_evaluation(processes: int) -> Result:
    """Process 1 gets no pair, because there is only one."""
    with folder() as name:
        arguments = {"eval_dataset": dpo.dataset(1)}
        trainer = dpo.trainer(tiny.exact(tiny.gpt2()), name, arguments=arguments, per_device_eval_batch_size=2)
        return {"weights": {}, "loss": [trainer.evaluate()["eval_loss"]]}


def reward_evaluation(processes: int) -> Result:
    """Process 1 gets no pair, because there is only one."""
    with folder() as name:
        data = {"train_dataset": reward.pairs(4), "eval_dataset": reward.pairs(1)}
        trainer = reward.trainer(reward.scorer(dtype=torch.float64), name, data, per_device_eval_batch_size=2)
        return {"weights": {}, "loss": [trainer.evaluate()["eval_loss"]]}


CASES: dict[str, Callable[[int], Result]] = {
    case.__name__: case for case in (grpo_masked, ddpo_without_signal, dpo_evaluation, reward_evaluation)
}


def main(results_folder: str) -> None:
    with process_of_many() as (rank, world_size):
        torch.save({name: case(world_size) for name, case in CASES.items()}, f"{results_folder}/{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
