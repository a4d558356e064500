"""What DPO, SFT on the chosen, GRPO and RAFT share: the pairs of the first two, and the looks during training."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Trainer, TrainerCallback

from experiments.assets import Split, model_folder, openings
from experiments.evaluation import continued
from experiments.frontier import efficiency_at_end, rewards_within
from experiments.run_folders import finish, show, write_per_prompt
from experiments.samples import write_answers
from experiments.sentiment import sentiment
from experiments.sentiment_ppo import Evaluation, Look
from trimtab_lm.hf.tracking import Tables

PAPER = "rafailov_2023_dpo_frontier"
Pair = dict[str, list[int]]


@dataclass(frozen=True)
class LookConfig:
    """The model, and how often the policy is evaluated on which openings."""

    model: str = field(
        default="stories15m",
        metadata={"help": "stories15m or smollm2, which are downloaded; or hub id or folder of a causal model."},
    )
    max_new_tokens: int = field(default=24, metadata={"help": "Tokens of a continuation at most."})
    eval_split: Split = field(
        default="test", metadata={"help": "Openings for reward and KL: test, or tune to choose settings."}
    )
    eval_prompts: int = field(default=128, metadata={"help": "Of these openings, how many are used."})
    look_every: int = field(default=8, metadata={"help": "Optimizer steps between two evaluations of reward and KL."})
    samples: int = field(default=5, metadata={"help": "How many openings the report shows."})


@dataclass(frozen=True)
class RunConfig(LookConfig):
    """The same with the pairs."""

    prompts: int = field(default=512, metadata={"help": "Openings to continue to make pairs."})
    per_prompt: int = field(
        default=4, metadata={"help": "Continuations of each; the more positive of every two is preferred."}
    )
    pairs_folder: str | None = field(
        default=None,
        metadata={"help": "Cache of pairs, by the settings that determine them, for runs that share them."},
    )


def load(name: str) -> tuple[Any, PreTrainedTokenizerBase]:
    """Loads the policy and its tokenizer; see `model_folder`."""
    name = model_folder(name)
    return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)


# Pairs ---------------------------------------------------------------------------------------------------------------


def every_pair(answers: Sequence[str], per_prompt: int) -> list[tuple[int, int]]:
    """The indices of the more and the less positive answer of every two of each prompt's `per_prompt` answers.

    Leaves out ties, and empty answers, where the model ended its text at once. Four answers give six pairs at most.
    """
    rewards = sentiment(answers)
    written = [i for i, answer in enumerate(answers) if answer.strip()]
    return [
        (first, second) if rewards[first] > rewards[second] else (second, first)
        for first, second in combinations(written, 2)
        if first // per_prompt == second // per_prompt and rewards[first] != rewards[second]
    ]


def sampled_pairs(model: Any, tokenizer: PreTrainedTokenizerBase, run: RunConfig, *, seed: int) -> list[Pair]:
    """Prompt, chosen and rejected answer, as the token ids that the model sampled.

    As texts, each answer would get an EOS, also where sampling stopped at `max_new_tokens`; the policy would learn it.
    """
    queries = openings("train")[: run.prompts]
    repeated = [query for query in queries for _ in range(run.per_prompt)]
    rows, answers = continued(model, tokenizer, repeated, max_new_tokens=run.max_new_tokens, seed=seed)
    pairs = []
    for better, worse in every_pair(answers, run.per_prompt):
        chosen, rejected = rows[better].tolist(), rows[worse].tolist()
        pairs.append({"prompt": tokenizer(repeated[better])["input_ids"], "chosen": chosen, "rejected": rejected})
    if not pairs:
        raise ValueError(
            f"No prompt of {len(queries)} has two answers of different reward among its {run.per_prompt}: there is no "
            "pair to learn from. Raise prompts, per_prompt or max_new_tokens."
        )
    return pairs


def pairs_of(model: Any, tokenizer: PreTrainedTokenizerBase, run: RunConfig, *, seed: int) -> list[Pair]:
    """Samples pairs, or reads those that `pairs_folder` has for the same settings."""
    if run.pairs_folder is None:
        return sampled_pairs(model, tokenizer, run, seed=seed)
    settings = ["every pair", run.model, run.prompts, run.per_prompt, run.max_new_tokens, seed]
    file = Path(run.pairs_folder, hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16] + ".json")
    if not file.exists():
        pairs = sampled_pairs(model, tokenizer, run, seed=seed)
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")  # parallel runs may write the same pairs
        unfinished.write_text(json.dumps(pairs), encoding="utf-8")
        unfinished.replace(file)
    return json.loads(file.read_text(encoding="utf-8"))


def learnt(prompt: list[int], answer: list[int], *, ignored: int = -100) -> dict[str, list[int]]:
    """A tokenized row whose labels ignore the prompt."""
    ids = prompt + answer
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [ignored] * len(prompt) + answer}


# Looks ---------------------------------------------------------------------------------------------------------------


class Looks(TrainerCallback):
    """Logs reward, KL and samples every `look_every` steps; `follow` does so after the last step."""

    def __init__(self, trainer: Trainer, evaluation: Evaluation, run: LookConfig):
        self.trainer, self.evaluation, self.run = trainer, evaluation, run
        self.tables = Tables()
        self.points: list[tuple[float, float]] = []  # KL and reward of every look

    def look(self) -> Look:
        """Evaluates the policy, and logs its reward, its KL and the first samples."""
        look, count = self.evaluation.look(), self.run.samples
        self.points.append((look.numbers["kl"], look.numbers["reward"]))
        self.trainer.log({f"eval_{name}": value for name, value in look.numbers.items()})
        rows = zip(self.evaluation.prompts[:count], look.answers[:count], look.rewards[:count], strict=True)
        self.tables.add(self.trainer, "samples", ["prompt", "answer", "reward"], rows)
        return look

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.run.look_every == 0 and state.global_step < state.max_steps:
            should_log = control.should_log
            self.look()
            control.should_log = should_log  # logging here would cancel the trainer's log of this step


def follow(
    trainer: Trainer,
    evaluation: Evaluation,
    run: LookConfig,
    *,
    scored_texts: int,
    title: str,
    panels: Mapping[str, Sequence[str]],
    learn: Callable[[Looks], None] | None = None,
) -> None:
    """Trains, evaluates before, during and after, and writes the summary. Every process calls this function.

    Args:
        trainer: Its `train` is called, unless there is `learn`.
        evaluation: Of its model.
        run: The settings of the looks.
        scored_texts: How many texts the reward scores for training.
        title: Of the report.
        panels: Of the figure of the run.
        learn: Trains, and looks during training.
    """
    looks = Looks(trainer, evaluation, run)
    before = looks.look()
    if learn is None:
        trainer.add_callback(looks)
        trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    else:
        learn(looks)
    after = looks.look()
    if trainer.is_world_process_zero():
        folder = Path(str(trainer.args.output_dir))
        show("before training", evaluation.prompts[: run.samples], before.answers[: run.samples])
        show("after training", evaluation.prompts[: run.samples], after.answers[: run.samples])
        first, last = before.numbers["reward"], after.numbers["reward"]
        print(f"reward of {run.eval_prompts} other prompts: {first:+.3f} -> {last:+.3f}   ", end="")
        print(f"more positive: {'yes' if last > first else 'NO'}")
        print(f"KL to the reference: {after.numbers['kl']:.2f} nats per response")
        write_per_prompt(folder, {"reward_before": before.rewards, "reward": after.rewards})
        write_answers(folder, evaluation.prompts, before.answers, after.answers, after.rewards, run.samples)
    summary = {"reward_before": before.numbers["reward"], **after.numbers, "scored_texts": scored_texts}
    summary |= rewards_within(looks.points) | efficiency_at_end(vars(run), summary)
    finish(trainer, title, panels, summary)
