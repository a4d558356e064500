"""GRPO on sums, a verifiable reward (Shao et al. 2024, arXiv:2402.03300). Claim and results: README.md."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict
from torch import Tensor

from experiments.assets import smollm2_135m_instruct
from experiments.runs import begin, finish, from_recipe, show, texts
from trimtab_lm.grpo import GRPOConfig, GRPOTrainer
from trimtab_lm.sampling.rollout import Rollout, RolloutBackend

PAPER = "shao_2024_grpo"
RECIPE = Path(__file__).with_name("recipe.yaml")
PANELS = {"share of right answers": ["reward", "eval_reward"], "entropy (nats per token)": ["entropy"]}
SHOTS = ((2, 3), (14, 5), (7, 6))


@dataclass(frozen=True)
class RunConfig:
    """The model and the questions."""

    model: str = field(
        default="smollm2-135m-instruct",
        metadata={"help": "Hub id or folder of a causal model; smollm2-135m-instruct is downloaded."},
    )
    largest: int = field(default=20, metadata={"help": "Numbers from 1 to this are added."})
    eval_prompts: int = field(default=32, metadata={"help": "Sums that are never trained on, for before and after."})
    samples: int = field(default=6, metadata={"help": "Of them, how many are shown with an answer."})


def question(first: int, second: int) -> str:
    """Returns a prompt: three solved sums, which show the form of an answer, and the sum to solve."""
    return "".join(f"{a} + {b} = {a + b}\n" for a, b in SHOTS) + f"{first} + {second} ="


def sums(run: RunConfig, *, seed: int) -> DatasetDict:
    """Returns shuffled splits train and test of prompt and answer. No sum is in both, in either order."""
    numbers = range(1, run.largest + 1)
    solved = {frozenset(shot) for shot in SHOTS}
    pairs = [(a, b) for a in numbers for b in numbers if frozenset((a, b)) not in solved]
    random.Random(seed).shuffle(pairs)
    test = pairs[: run.eval_prompts]
    asked = {frozenset(pair) for pair in test}
    train = [pair for pair in pairs if frozenset(pair) not in asked]
    return DatasetDict(
        {
            name: Dataset.from_list([{"prompt": question(a, b), "answer": a + b} for a, b in chosen])
            for name, chosen in (("train", train), ("test", test))
        }
    )


def right(completions: Sequence[str], answer: Sequence[int], **_: object) -> list[float]:
    """Returns 1 where the first line of a completion is exactly the answer, else 0."""
    lines = [completion.partition("\n")[0].strip() for completion in completions]
    return [float(line == str(number)) for line, number in zip(lines, answer, strict=True)]


class Clock:
    """Wraps a sampler of completions, and counts its calls and their seconds."""

    def __init__(self, sampler: RolloutBackend):
        self.sampler, self.calls, self.seconds = sampler, 0, 0.0

    def sync(self, model: Any, version: int) -> None:
        self.sampler.sync(model, version)

    def generate(self, prompts: Sequence[Tensor], *, num_generations: int, version: int, seed: int) -> Rollout:
        start = time.perf_counter()
        rollout = self.sampler.generate(prompts, num_generations=num_generations, version=version, seed=seed)
        self.calls, self.seconds = self.calls + 1, self.seconds + time.perf_counter() - start
        return rollout


def share_right(trainer: GRPOTrainer, run: RunConfig, *, when: str) -> float:
    """Returns the share of right answers to the test sums, and prints some answers."""
    accuracy, args = trainer.evaluate()["eval_reward"], trainer.args
    shown, model = trainer.eval_dataset["prompt"][: run.samples], trainer.accelerator.unwrap_model(trainer.model)
    answers = texts(model, trainer.tokenizer, shown, max_new_tokens=args.max_completion_length, seed=args.seed)
    if trainer.is_world_process_zero():
        show(f"{when} training", [prompt.splitlines()[-1] for prompt in shown], answers)
    return accuracy


def main(run: RunConfig, grpo: GRPOConfig) -> None:
    """Trains, and prints the share of right answers to the test sums before and after."""
    history = begin(PAPER, run, grpo)
    name = str(smollm2_135m_instruct()) if run.model == "smollm2-135m-instruct" else run.model
    data = sums(run, seed=0)
    trainer = GRPOTrainer(name, right, grpo, data["train"], data["test"], callbacks=[history])
    before = share_right(trainer, run, when="before")
    clock = trainer.backend = Clock(sampler := trainer.backend)
    trainer.train(resume_from_checkpoint=grpo.resume_from_checkpoint)
    trainer.backend = sampler  # the calls of an evaluation do not count
    after = share_right(trainer, run, when="after")
    if trainer.is_world_process_zero():
        asked = len(data["test"]) * grpo.num_generations
        print(f"right of {asked} answers to other sums: {before:.3f} -> {after:.3f}   ", end="")
        print(f"higher: {'yes' if after > before else 'NO'}")
    summary = {"right_before": before, "right": after}
    summary |= {"generation_calls": clock.calls, "generation_seconds": clock.seconds}
    finish(trainer, f"GRPO: {run.model}, sums up to {run.largest}", PANELS, summary)


def settings(argv: Sequence[str] | None = None, **changes: object) -> tuple[RunConfig, GRPOConfig]:
    """The settings of a run: see `from_recipe`."""
    return from_recipe(RECIPE, RunConfig, GRPOConfig, argv=argv, **changes)


if __name__ == "__main__":
    main(*settings())
