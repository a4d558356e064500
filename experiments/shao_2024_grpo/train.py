"""GRPO with a verifiable reward, sums (Shao et al. 2024, arXiv:2402.03300). What you should see: README.md."""

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict
from torch import Tensor

from trimtab_common.config import parse_config
from trimtab_lm.grpo import GRPOConfig, GRPOTrainer
from trimtab_lm.sampling.rollout import Rollout, RolloutBackend

# The file is run by its path, from anywhere; the experiments are not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.assets import smollm2_135m_instruct
from experiments.runs import begin, changed, finish, run_folder, show, texts

PAPER = "shao_2024_grpo"
PANELS = {"share of right answers": ["reward", "eval_reward"], "entropy (nats per token)": ["entropy"]}
SHOTS = ((2, 3), (14, 5), (7, 6))


@dataclass(frozen=True)
class RunConfig:
    """What answers, and which questions."""

    model: str = field(
        default="smollm2-135m-instruct",
        metadata={"help": "Hub id or folder of a causal model; smollm2-135m-instruct is downloaded."},
    )
    largest: int = field(default=20, metadata={"help": "Numbers from 1 to this are added."})
    eval_prompts: int = field(default=32, metadata={"help": "Sums that are never trained on, for before and after."})
    samples: int = field(default=6, metadata={"help": "Of them, how many are shown with an answer."})


@dataclass
class SumsGRPOConfig(GRPOConfig):
    """GRPO with this experiment's defaults: a few minutes on two cores."""

    output_dir: str | None = run_folder(PAPER)
    report_to: None | str | list[str] = changed(GRPOConfig, "report_to", "wandb")  # noqa: RUF036
    run_name: str | None = changed(GRPOConfig, "run_name", "grpo")
    save_strategy: str = changed(GRPOConfig, "save_strategy", "no")
    logging_steps: float = changed(GRPOConfig, "logging_steps", 2)
    max_steps: int = changed(GRPOConfig, "max_steps", 30)
    per_device_train_batch_size: int = changed(GRPOConfig, "per_device_train_batch_size", 8)
    per_device_eval_batch_size: int = changed(GRPOConfig, "per_device_eval_batch_size", 16)
    num_generations: int = changed(GRPOConfig, "num_generations", 8)
    max_completion_length: int = changed(GRPOConfig, "max_completion_length", 4)
    learning_rate: float = changed(GRPOConfig, "learning_rate", 1e-5)
    warmup_steps: float = changed(GRPOConfig, "warmup_steps", 2)
    lr_scheduler_type: str = changed(GRPOConfig, "lr_scheduler_type", "constant_with_warmup")


def question(first: int, second: int) -> str:
    """A sum behind solved ones, which show a model that was trained on text what an answer looks like."""
    return "".join(f"{a} + {b} = {a + b}\n" for a, b in SHOTS) + f"{first} + {second} ="


def sums(run: RunConfig, *, seed: int) -> DatasetDict:
    """Splits train and test of the columns prompt and answer, no sum in both, in either order, shuffled."""
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
    """1 where the first line of a completion is the answer and nothing else, 0 elsewhere."""
    lines = [completion.partition("\n")[0].strip() for completion in completions]
    return [float(line == str(number)) for line, number in zip(lines, answer, strict=True)]


class Clock:
    """A sampler of completions that counts the calls of another, and the seconds that they take."""

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
    """The share of right answers to the sums that are never trained on; some answers are shown."""
    accuracy, args = trainer.evaluate()["eval_reward"], trainer.args
    shown, model = trainer.eval_dataset["prompt"][: run.samples], trainer.accelerator.unwrap_model(trainer.model)
    answers = texts(model, trainer.tokenizer, shown, max_new_tokens=args.max_completion_length, seed=args.seed)
    if trainer.is_world_process_zero():
        show(f"{when} training", [prompt.splitlines()[-1] for prompt in shown], answers)
    return accuracy


def main(run: RunConfig, grpo: GRPOConfig) -> None:
    """Train, and print the share of right answers to sums never trained on, before and after."""
    history = begin(PAPER, run, grpo)
    name = str(smollm2_135m_instruct()) if run.model == "smollm2-135m-instruct" else run.model
    data = sums(run, seed=0)
    trainer = GRPOTrainer(name, right, grpo, data["train"], data["test"], callbacks=[history])
    before = share_right(trainer, run, when="before")
    clock = trainer.backend = Clock(sampler := trainer.backend)
    trainer.train(resume_from_checkpoint=grpo.resume_from_checkpoint)
    trainer.backend = sampler  # what an evaluation asks is not counted
    after = share_right(trainer, run, when="after")
    if trainer.is_world_process_zero():
        asked = len(data["test"]) * grpo.num_generations
        print(f"right of {asked} answers to other sums: {before:.3f} -> {after:.3f}   ", end="")
        print(f"higher: {'yes' if after > before else 'NO'}")
    found = {"right_before": before, "right": after}
    found |= {"generation_calls": clock.calls, "generation_seconds": clock.seconds}
    finish(trainer, f"GRPO: {run.model}, sums up to {run.largest}", PANELS, found)


if __name__ == "__main__":
    main(*parse_config(RunConfig, SumsGRPOConfig))
