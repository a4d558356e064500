"""GRPO on a reward that is checked, not judged (Shao et al. 2024, arXiv:2402.03300). What you should see: README.md."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from trimtab_common.config import parse_config
from trimtab_lm.grpo import GRPOConfig, GRPOTrainer

# The file is run by its path, from anywhere; the experiments are not installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.assets import openings, stories15m
from experiments.runs import begin, changed, finish, run_folder, show, texts

PAPER = "shao_2024_grpo"
PANELS = {"reward": ["reward"], "entropy (nats per token)": ["entropy"]}


@dataclass(frozen=True)
class RunConfig:
    """What samples, and what is asked of it."""

    model: str = field(
        default="stories15m", metadata={"help": "Hub id or folder of a causal model; stories15m is downloaded."}
    )
    word: str = field(default="dog", metadata={"help": "The word that a continuation has to hold."})
    eval_prompts: int = field(default=128, metadata={"help": "Other openings, for the share that holds it."})
    samples: int = field(default=5, metadata={"help": "Of them, how many are shown."})


@dataclass
class WordGRPOConfig(GRPOConfig):
    """GRPO with this experiment's defaults: a few minutes on two cores."""

    output_dir: str | None = run_folder(PAPER)
    report_to: None | str | list[str] = changed(GRPOConfig, "report_to", "wandb")  # noqa: RUF036
    run_name: str | None = changed(GRPOConfig, "run_name", "grpo")
    save_strategy: str = changed(GRPOConfig, "save_strategy", "no")
    logging_steps: float = changed(GRPOConfig, "logging_steps", 1)
    max_steps: int = changed(GRPOConfig, "max_steps", 30)
    per_device_train_batch_size: int = changed(GRPOConfig, "per_device_train_batch_size", 8)
    num_generations: int = changed(GRPOConfig, "num_generations", 8)
    max_completion_length: int = changed(GRPOConfig, "max_completion_length", 24)
    learning_rate: float = changed(GRPOConfig, "learning_rate", 1e-4)
    lr_scheduler_type: str = changed(GRPOConfig, "lr_scheduler_type", "constant")


def holds(word: str, completions: Sequence[str]) -> list[float]:
    """1 for each text in which the word stands by itself, else 0."""
    return [float(word in "".join(c if c.isalpha() else " " for c in text.lower()).split()) for text in completions]


def main(run: RunConfig, grpo: GRPOConfig) -> None:
    """Learn to work a word into a story, and print how often it is there, before and after."""
    history = begin(PAPER, run, grpo)
    name = str(stories15m()) if run.model == "stories15m" else run.model
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    queries = openings()
    held_out, queries = queries[: run.eval_prompts], queries[run.eval_prompts :]

    def has_word(completions: Sequence[str], **_: Any) -> list[float]:
        return holds(run.word, completions)

    trainer = GRPOTrainer(
        model, has_word, grpo, train_dataset=Dataset.from_dict({"prompt": queries}), processing_class=tokenizer,
        callbacks=[history],
    )  # fmt: skip

    def look(stage: str) -> float:
        policy = trainer.accelerator.unwrap_model(trainer.model)
        answers = texts(policy, tokenizer, held_out, max_new_tokens=grpo.max_completion_length, seed=grpo.seed)
        if trainer.is_world_process_zero():
            show(f"{stage} training", held_out[: run.samples], answers[: run.samples])
        return fmean(holds(run.word, answers))

    before = look("before")
    trainer.train(resume_from_checkpoint=grpo.resume_from_checkpoint)
    after = look("after")
    if trainer.is_world_process_zero():
        print(f"continuations of {len(held_out)} other prompts with the word '{run.word}': ", end="")
        print(f"{before:.1%} -> {after:.1%}   more: {'yes' if after > before else 'NO'}")
    finish(trainer, f"GRPO: {run.model}, '{run.word}'", PANELS, {"accuracy_before": before, "accuracy": after})


if __name__ == "__main__":
    main(*parse_config(RunConfig, WordGRPOConfig))
