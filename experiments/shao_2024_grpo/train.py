"""GRPO on sums, a verifiable reward (Shao et al. 2024, arXiv:2402.03300). Claim and results: README.md."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Literal, get_args

import torch
from datasets import Dataset, DatasetDict
from torch import Tensor
from transformers import AutoModelForCausalLM

from experiments.assets import model_folder
from experiments.run_folders import begin, finish, from_recipe, show, write_per_prompt
from experiments.samples import write_samples
from experiments.shao_2024_grpo.answers import right, scores_of
from experiments.shao_2024_grpo.exact import probability_of_right
from experiments.shao_2024_grpo.variance import gradient_variances
from trimtab_lm.data.prompts import PROMPT_IDS
from trimtab_lm.grpo import GRPOConfig, GRPOTrainer
from trimtab_lm.interface import Model
from trimtab_lm.sampling.generate import eos_token_ids
from trimtab_lm.sampling.rollout import Rollout, RolloutBackend

PAPER = "shao_2024_grpo"
RECIPE = Path(__file__).with_name("recipe.yaml")
PANELS = {"share of right answers": ["reward"], "entropy (nats per token)": ["entropy"]}
SHOTS = ((2, 3), (14, 5), (7, 6))
Split = Literal["tune", "test"]
Method = Literal["grpo", "online_rft", "rft"]
METHODS: tuple[Method, ...] = get_args(Method)


@dataclass(frozen=True)
class RunConfig:
    """The method, the model and the questions."""

    method: Method = field(
        default="grpo",
        metadata={
            "help": "grpo; online_rft: learn the policy's right answers alone, each alike; rft: the same with answers "
            "of the model as it was before training."
        },
    )
    model: str = field(
        default="smollm2",
        metadata={"help": "stories15m or smollm2, which are downloaded; or hub id or folder of a causal model."},
    )
    largest: int = field(default=20, metadata={"help": "Numbers from 1 to this are added."})
    eval_split: Split = field(default="test", metadata={"help": "Sums to evaluate on: test, or tune for settings."})
    eval_prompts: int = field(default=48, metadata={"help": "Sums of each of these splits; they are not trained on."})
    eval_answers: int = field(default=8, metadata={"help": "Answers to each sum, a power of two."})
    only_after: bool = field(default=False, metadata={"help": "Evaluate after training only."})
    variance_prompts: int = field(
        default=0,
        metadata={
            "help": "Of the evaluated sums, on how many the variance of the gradient is measured before training."
        },
    )
    samples: int = field(default=6, metadata={"help": "Of the evaluated sums, how many are shown with an answer."})

    def __post_init__(self) -> None:
        if self.eval_answers & (self.eval_answers - 1) or self.eval_answers < 1:
            raise ValueError(
                f"eval_answers={self.eval_answers}: Maj@K and Pass@K halve K down to 1. Use a power of two."
            )
        if self.variance_prompts == 1 or self.variance_prompts > self.eval_prompts:
            raise ValueError(
                f"variance_prompts={self.variance_prompts}: a variance needs two of the {self.eval_prompts} evaluated "
                "sums at least. Use 0 for none, or 2 to eval_prompts."
            )


def question(first: int, second: int) -> str:
    """Returns a prompt: three solved sums, which show the form of an answer, and the sum to solve."""
    return "".join(f"{a}+{b}={a + b}\n" for a, b in SHOTS) + f"{first}+{second}="


def sums(run: RunConfig, *, seed: int) -> DatasetDict:
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


def look(trainer: GRPOTrainer, run: RunConfig, *, when: str) -> tuple[dict[str, list[float]], list[str]]:
    """Scores the evaluated sums, and prints some answers; returns the scores of each sum and one answer to it.

    The share of right answers and Pass@K are exact, by `probability_of_right`; Maj@K is of sampled answers.
    """
    rows, seed = trainer.eval_dataset, trainer.args.seed
    model = trainer.accelerator.unwrap_model(trainer.model)
    trainer.sampler.version += 1
    trainer.backend.sync(model, trainer.sampler.version)
    prompts = [torch.tensor(ids) for ids in rows[PROMPT_IDS]]
    rollout = trainer.backend.generate(
        prompts, num_generations=run.eval_answers, version=trainer.sampler.version, seed=seed
    )
    texts = trainer.tokenizer.batch_decode(rollout.completions, skip_special_tokens=True)
    lines = [text.partition("\n")[0].strip() for text in texts]
    groups = [lines[start : start + run.eval_answers] for start in range(0, len(lines), run.eval_answers)]
    probabilities = probability_of_right(
        model,
        trainer.tokenizer,
        prompts,
        rows["answer"],
        max_tokens=trainer.args.max_completion_length,
        temperature=trainer.args.temperature,
        end_ids=eos_token_ids(model, trainer.tokenizer.eos_token_id),
    )
    scores = [
        scores_of(group, str(answer), probability)
        for group, answer, probability in zip(groups, rows["answer"], probabilities, strict=True)
    ]
    firsts = [group[0] for group in groups]
    if trainer.is_world_process_zero():
        show(f"{when} training", asked(trainer)[: run.samples], firsts[: run.samples])
    return {name: [score[name] for score in scores] for name in scores[0]}, firsts


def asked(trainer: GRPOTrainer) -> list[str]:
    """Returns the evaluated sums, as the last lines of their prompts."""
    return [prompt.splitlines()[-1] for prompt in trainer.eval_dataset["prompt"]]


def main(run: RunConfig, grpo: GRPOConfig) -> None:
    """Trains, and prints the share of right answers to the evaluated sums before and after."""
    if run.method != "grpo":  # the gradient of the log-probability of right answers, and of no others
        grpo = replace(grpo, scale_rewards="raw")
    history = begin(PAPER, run, grpo)
    name = model_folder(run.model)
    data = sums(run, seed=0)
    trainer = GRPOTrainer(name, right, grpo, data["train"], data[run.eval_split], callbacks=[history])
    before, old_answers = ({}, []) if run.only_after else look(trainer, run, when="before")
    first_rows = [trainer.eval_dataset[i] for i in range(run.variance_prompts)]
    variances = gradient_variances(trainer, first_rows, seed=grpo.seed) if first_rows else {}
    policy_sampler = trainer.backend
    if run.method == "rft":
        pretrained = AutoModelForCausalLM.from_pretrained(name, dtype=trainer.model.dtype).to(trainer.args.device)
        trainer.backend = PretrainedSampler(policy_sampler, pretrained.eval())
    trainer.train(resume_from_checkpoint=grpo.resume_from_checkpoint)
    trainer.backend = policy_sampler
    after, answers = look(trainer, run, when="after")
    of_sums = {f"{name}_before": row for name, row in before.items()} | after
    summary = {name: fmean(row) for name, row in of_sums.items()} | variances
    if trainer.is_world_process_zero():
        shares = " -> ".join(f"{summary[name]:.3f}" for name in ("right_before", "right") if name in summary)
        print(f"right of the answers to {len(after['right'])} other sums: {shares}")
        write_per_prompt(Path(str(grpo.output_dir)), of_sums)
        columns = {"sum": asked(trainer), "before": old_answers or [""] * len(answers), "after": answers}
        columns["right after"] = after["right"]
        write_samples(Path(str(grpo.output_dir)), columns, rewards=after["right"], count=run.samples)
    finish(trainer, f"{run.method}: {run.model}, sums up to {run.largest}", PANELS, summary)


def settings(argv: Sequence[str] | None = None, **changes: object) -> tuple[RunConfig, GRPOConfig]:
    """The settings of a run: see `from_recipe`."""
    return from_recipe(RECIPE, RunConfig, GRPOConfig, argv=argv, **changes)


if __name__ == "__main__":
    main(*settings())
