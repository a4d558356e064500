"""GRPO with a verifiable reward, sums (Shao et al. 2024, arXiv:2402.03300). What you should see: README.md."""

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset, DatasetDict

from trimtab_common.config import parse_config
from trimtab_lm.grpo import GRPOConfig, GRPOTrainer

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
    """Splits train and test of the columns prompt and answer, no sum in both, shuffled."""
    numbers = range(1, run.largest + 1)
    rows = [{"prompt": question(a, b), "answer": a + b} for a in numbers for b in numbers if (a, b) not in SHOTS]
    random.Random(seed).shuffle(rows)
    cut = run.eval_prompts
    return DatasetDict({"test": Dataset.from_list(rows[:cut]), "train": Dataset.from_list(rows[cut:])})


def right(completions: Sequence[str], answer: Sequence[int], **_: object) -> list[float]:
    """1 where the first line of a completion is the answer and nothing else, 0 elsewhere."""
    lines = [completion.partition("\n")[0].strip() for completion in completions]
    return [float(line == str(number)) for line, number in zip(lines, answer, strict=True)]


def main(run: RunConfig, grpo: GRPOConfig) -> None:
    """Train, and print the share of right answers to sums never trained on, before and after."""
    history = begin(PAPER, run, grpo)
    name = str(smollm2_135m_instruct()) if run.model == "smollm2-135m-instruct" else run.model
    data = sums(run, seed=0)
    trainer = GRPOTrainer(name, right, grpo, data["train"], data["test"], callbacks=[history])
    shown = data["test"]["prompt"][: run.samples]
    accuracies, settings = [], {"max_new_tokens": grpo.max_completion_length, "seed": grpo.seed}
    for stage in ("before", "after"):
        if stage == "after":
            trainer.train(resume_from_checkpoint=grpo.resume_from_checkpoint)
        accuracies.append(trainer.evaluate()["eval_reward"])
        model = trainer.accelerator.unwrap_model(trainer.model)
        answers = texts(model, trainer.tokenizer, shown, **settings)
        if trainer.is_world_process_zero():
            show(f"{stage} training", [prompt.splitlines()[-1] for prompt in shown], answers)
    first, last = accuracies
    if trainer.is_world_process_zero():
        asked = len(data["test"]) * grpo.num_generations
        print(f"right of {asked} answers to other sums: {first:.3f} -> {last:.3f}   ", end="")
        print(f"higher: {'yes' if last > first else 'NO'}")
    finish(trainer, f"GRPO: {run.model}, sums up to {run.largest}", PANELS, {"right_before": first, "right": last})


if __name__ == "__main__":
    main(*parse_config(RunConfig, SumsGRPOConfig))
