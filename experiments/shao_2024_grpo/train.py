"""GRPO on sums, a verifiable reward (Shao et al. 2024, arXiv:2402.03300). Claim and results: README.md."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, get_args

import torch
from accelerate import PartialState
from datasets import Dataset, DatasetDict
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from experiments.assets import model_folder
from experiments.best_of import powers
from experiments.run_folders import begin, finish, from_recipe, show, write_per_prompt
from experiments.samples import write_samples
from experiments.shao_2024_grpo.answers import is_a_number, maj_at, pass_at, right
from experiments.shao_2024_grpo.exact import line_probabilities
from experiments.shao_2024_grpo.variance import gradient_variances
from trimtab_lm.grpo import GRPOConfig, GRPOTrainer
from trimtab_lm.interface import Model
from trimtab_lm.sampling.rollout import Rollout, RolloutBackend, eos_token_ids

PAPER = "shao_2024_grpo"
RECIPE = Path(__file__).with_name("recipe.yaml")
PANELS = {"share of right answers": ["reward"], "entropy (nats per token)": ["entropy"]}
MOST = 1024  # K of Pass@K, at most
SHOTS = ((2, 3), (14, 5), (7, 6))
Split = Literal["tune", "test"]
Method = Literal["grpo", "dr_grpo", "online_rft", "rft", "form"]
METHODS: tuple[Method, ...] = get_args(Method)
# Fields of GRPOConfig. With raw rewards the gradient is that of the log-probability of right answers, and of no others.
CHANGES: dict[Method, dict[str, Any]] = {
    "dr_grpo": {"scale_rewards": "none", "loss_type": "dr_grpo"},
    "online_rft": {"scale_rewards": "raw"},
    "rft": {"scale_rewards": "raw"},
}


@dataclass(frozen=True)
class SumsConfig:
    """The model and the questions."""

    model: str = field(
        default="smollm2",
        metadata={"help": "stories15m or smollm2, which are downloaded; or hub id or folder of a causal model."},
    )
    largest: int = field(default=20, metadata={"help": "Numbers from 1 to this are added."})
    eval_split: Split = field(default="test", metadata={"help": "Sums to evaluate on: test, or tune for settings."})
    eval_prompts: int = field(default=48, metadata={"help": "Sums of each of these splits; they are not trained on."})
    majority_of: int = field(default=8, metadata={"help": "The largest K of Maj@K, a power of two."})
    samples: int = field(default=6, metadata={"help": "Of the evaluated sums, how many are shown with an answer."})

    def __post_init__(self) -> None:
        if self.majority_of & (self.majority_of - 1) or self.majority_of < 1:
            raise ValueError(f"majority_of={self.majority_of}: Maj@K halves K down to 1. Use a power of two.")


@dataclass(frozen=True)
class RunConfig(SumsConfig):
    """The method, and what a run measures besides."""

    method: Method = field(
        default="grpo",
        metadata={
            "help": "grpo; dr_grpo: undivided advantages and a constant normalization; online_rft: learn the policy's "
            "right answers alone, each alike; rft: the same with answers of the model as it was before training; "
            "form: GRPO rewarded for any number."
        },
    )
    only_after: bool = field(default=False, metadata={"help": "Evaluate after training only."})
    variance_prompts: int = field(
        default=0,
        metadata={
            "help": "Of the evaluated sums, on how many the variance of the gradient is measured before training."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variance_prompts == 1 or self.variance_prompts > self.eval_prompts:
            raise ValueError(
                f"variance_prompts={self.variance_prompts}: a variance needs two of the {self.eval_prompts} evaluated "
                "sums at least. Use 0 for none, or 2 to eval_prompts."
            )


def question(first: int, second: int) -> str:
    """Returns a prompt: three solved sums, which show the form of an answer, and the sum to solve."""
    return "".join(f"{a}+{b}={a + b}\n" for a, b in SHOTS) + f"{first}+{second}="


def sums(run: SumsConfig, *, seed: int) -> DatasetDict:
    """Returns shuffled splits train, tune and test of prompt and answer. No sum is in two, in either order."""
    numbers = range(1, run.largest + 1)
    solved = {frozenset(shot) for shot in SHOTS}
    pairs = [(a, b) for a in numbers for b in numbers if frozenset((a, b)) not in solved]
    random.Random(seed).shuffle(pairs)
    splits: dict[str, list[tuple[int, int]]] = {"test": [], "tune": [], "train": []}
    evaluated: set[frozenset[int]] = set()
    for pair in pairs:
        name = next((name for name in ("test", "tune") if len(splits[name]) < run.eval_prompts), "train")
        if frozenset(pair) not in evaluated:
            splits[name].append(pair)
            if name != "train":
                evaluated.add(frozenset(pair))
    return DatasetDict(
        {
            name: Dataset.from_list([{"prompt": question(a, b), "answer": a + b} for a, b in chosen])
            for name, chosen in splits.items()
        }
    )


class PretrainedSampler:
    """Samples from a model that training does not change: the answers of offline rejection sampling.

    Args:
        sampler: what samples.
        model: the model to sample from.
    """

    def __init__(self, sampler: RolloutBackend, model: Model):
        self.sampler, self.settings = sampler, sampler.settings
        sampler.sync(model, 0)

    def sync(self, model: Model, version: int) -> None:
        """Keeps the weights, whatever the policy's."""

    def generate(self, prompts: Sequence[Tensor], *, num_generations: int, version: int, seed: int) -> Rollout:
        """Completions of the unchanged model."""
        return self.sampler.generate(prompts, num_generations=num_generations, version=0, seed=seed)


class Look(NamedTuple):
    """What an evaluation of P sums found: scores by name, each [P], and the likeliest answers."""

    scores: dict[str, list[float]]
    answers: list[str]

    def means(self) -> dict[str, float]:
        """The mean of each score, and Pass@K up to K = MOST."""
        passes = {f"pass@{k}": fmean(pass_at(k, p) for p in self.scores["right"]) for k in powers(MOST)}
        return {name: fmean(row) for name, row in self.scores.items()} | passes


def look(
    model: Any, tokenizer: PreTrainedTokenizerBase, rows: Dataset, run: SumsConfig, *, when: str, **sampling: Any
) -> Look:
    """Computes the probability that an answer is right, and Maj@K, for each sum; prints some of the likeliest answers.

    Args:
        model: A causal model.
        tokenizer: Its tokenizer.
        rows: Sums, as columns prompt and answer.
        run: The settings of the run.
        when: "before" or "after" training.
        sampling: max_tokens and temperature of `line_probabilities`.
    """
    prompts = [torch.tensor(tokenizer(prompt)["input_ids"]) for prompt in rows["prompt"]]
    ends = eos_token_ids(model, tokenizer.eos_token_id)
    found = line_probabilities(model, tokenizer, prompts, rows["answer"], end_ids=ends, **sampling)
    truths = [str(answer) for answer in rows["answer"]]
    scores = {"right": [lines.get(truth, 0.0) for lines, truth in zip(found, truths, strict=True)]}
    for k in powers(run.majority_of):
        scores[f"maj@{k}"] = [maj_at(k, lines, truth) for lines, truth in zip(found, truths, strict=True)]
    likeliest = [max(lines, key=lines.__getitem__, default="") for lines in found]
    if PartialState().is_main_process:
        show(f"{when} training", asked(rows)[: run.samples], likeliest[: run.samples])
    return Look(scores, likeliest)


def asked(rows: Dataset) -> list[str]:
    """Returns the sums, as the last lines of their prompts."""
    return [prompt.splitlines()[-1] for prompt in rows["prompt"]]


def write(folder: Path, rows: Dataset, before: Look | None, after: Look, run: SumsConfig) -> dict[str, float]:
    """Writes the scores of each sum and some answers into a run's folder; returns the means for its summary."""
    first = {} if before is None else {f"{name}_before": row for name, row in before.scores.items()}
    write_per_prompt(folder, first | after.scores)
    old_answers = [""] * len(after.answers) if before is None else before.answers
    columns = {"sum": asked(rows), "before": old_answers, "after": after.answers, "right after": after.scores["right"]}
    write_samples(folder, columns, rewards=after.scores["right"], count=run.samples)
    looks = [("_before", before)] if before is not None else []
    summary = {name + when: value for when, seen in (*looks, ("", after)) for name, value in seen.means().items()}
    shares = " -> ".join(f"{summary[name]:.3f}" for name in ("right_before", "right") if name in summary)
    print(f"right of the answers to {len(rows)} other sums: {shares}")
    return summary


def main(run: RunConfig, grpo: GRPOConfig) -> None:
    """Trains, and computes the share of right answers to the evaluated sums before and after."""
    grpo = replace(grpo, **CHANGES.get(run.method, {}))
    history = begin(PAPER, run, grpo)
    name = model_folder(run.model)
    data = sums(run, seed=0)
    rows, reward = data[run.eval_split], is_a_number if run.method == "form" else right
    trainer = GRPOTrainer(name, reward, grpo, data["train"], rows, callbacks=[history])
    model = trainer.accelerator.unwrap_model(trainer.model)
    seen = partial(
        look, model, trainer.tokenizer, rows, run, max_tokens=grpo.max_completion_length, temperature=grpo.temperature
    )
    before = None if run.only_after else seen(when="before")
    first_rows = [trainer.eval_dataset[i] for i in range(run.variance_prompts)]
    variances = gradient_variances(trainer, first_rows, seed=grpo.seed) if first_rows else {}
    if run.method == "rft":
        pretrained = AutoModelForCausalLM.from_pretrained(name, dtype=trainer.model.dtype).to(trainer.args.device)
        trainer.backend = PretrainedSampler(trainer.backend, pretrained.eval())
    trainer.train(resume_from_checkpoint=grpo.resume_from_checkpoint)
    after, summary = seen(when="after"), variances
    if trainer.is_world_process_zero():
        summary |= write(Path(str(grpo.output_dir)), rows, before, after, run)
    finish(trainer, f"{run.method}: {run.model}, sums up to {run.largest}", PANELS, summary)


def settings(argv: Sequence[str] | None = None, **changes: object) -> tuple[RunConfig, GRPOConfig]:
    """The settings of a run: see `from_recipe`."""
    return from_recipe(RECIPE, RunConfig, GRPOConfig, argv=argv, **changes)


if __name__ == "__main__":
    main(*settings())
