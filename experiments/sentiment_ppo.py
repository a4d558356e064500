"""PPO on continuations of sentences, which several experiments share."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from experiments.assets import Split, model_folder, openings
from experiments.evaluation import continued, kl_of_samples
from experiments.frontier import efficiency_at_end, rewards_within
from experiments.run_folders import append, close_folder, numbers_in, open_folder, read_history, show, write_per_prompt
from experiments.samples import write_answers
from experiments.sentiment import sentiment
from trimtab_common.config import to_flat_dict
from trimtab_lm import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, set_seed
from trimtab_lm.sampling.rollout import eos_token_ids

REWARD, KL = "ppo/mean_scores", "objective/kl"
EVAL_REWARD, EVAL_KL = "eval_reward", "eval_kl"
Reward = Callable[[Sequence[str]], list[float]]


@dataclass(frozen=True)
class StoriesRun:
    """The settings of such an experiment that PPOConfig does not have."""

    model: str = field(
        default="stories15m",
        metadata={"help": "stories15m or smollm2, which are downloaded; or hub id or folder of a causal model."},
    )
    max_new_tokens: int = field(default=24, metadata={"help": "Tokens of a continuation at most."})
    stops: tuple[str, ...] = field(
        default=(), metadata={"help": "Tokens that end a continuation, besides those of the model, such as . and !"}
    )
    sampling_temperature: float = field(
        default=1.0, metadata={"help": "Divides the logits where continuations are sampled to learn from."}
    )
    eval_split: Split = field(
        default="test",
        metadata={"help": "Openings for reward and KL before and after: test, or tune to choose settings."},
    )
    eval_prompts: int = field(default=128, metadata={"help": "Of these openings, how many are used."})
    look_every: int | None = field(
        default=None, metadata={"help": "PPO steps between two evaluations of reward and KL. None: before and after."}
    )
    samples: int = field(default=6, metadata={"help": "How many of them the report shows."})
    resume_from: str | None = field(
        default=None,
        metadata={"help": "Checkpoint folder to resume from, or 'latest' (needs output_dir, save_steps)."},
    )


def load(model: str) -> tuple[AutoModelForCausalLMWithValueHead, PreTrainedTokenizerBase]:
    """Loads the policy with a value head, and its tokenizer."""
    name = model_folder(model)
    # This model's hidden states are large: a random head would start with values five times the largest reward.
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(name, v_head_init_strategy="zero")
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return policy, tokenizer


def end_at(policy: Any, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> None:
    """Adds the tokens `stops` to those that end a response of `policy`."""
    vocabulary = tokenizer.get_vocab()
    if unknown := [token for token in stops if token not in vocabulary]:
        raise ValueError(
            f"stops={list(stops)}: {unknown} is no token of this model's tokenizer. Write tokens as its "
            "vocabulary spells them."
        )
    config = policy.pretrained_model.generation_config
    known = eos_token_ids(policy.pretrained_model, tokenizer.eos_token_id)
    config.eos_token_id = [*known, *(vocabulary[token] for token in stops)]


def prompts(tokenizer: PreTrainedTokenizerBase, queries: Sequence[str]) -> Dataset:
    """A dataset of the columns query and input_ids."""
    return Dataset.from_dict({"query": list(queries), "input_ids": tokenizer(list(queries))["input_ids"]})


class Look(NamedTuple):
    """What an evaluation saw.

    Attributes:
        numbers: reward (mean), kl (nats per response), ended (share of answers with an end token).
        rewards: Of each answer.
        answers: Texts, one for each opening.
    """

    numbers: dict[str, float]
    rewards: list[float]
    answers: list[str]


class Evaluation:
    """Measures the policy on openings that it is not trained on, with the same random numbers every time.

    The reference of the KL is a copy of the model at construction.
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, reward: Reward, run: StoriesRun, *, seed: int):
        self.model, self.tokenizer, self.reward, self.run, self.seed = model, tokenizer, reward, run, seed
        self.prompts = openings(run.eval_split)[: run.eval_prompts]
        self.ids = [torch.tensor(tokenizer(prompt)["input_ids"]) for prompt in self.prompts]
        self.reference = deepcopy(model).eval()

    def answers(self) -> tuple[list[torch.Tensor], list[str]]:
        """Samples an answer to each opening: token ids, and texts."""
        settings = {"max_new_tokens": self.run.max_new_tokens, "seed": self.seed}
        return continued(self.model, self.tokenizer, self.prompts, **settings)

    def look(self) -> Look:
        """Samples an answer to each opening and measures the answers."""
        rows, answers = self.answers()
        rewards = self.reward(answers)
        kl = kl_of_samples(self.model, self.reference, self.ids, rows)
        ends = eos_token_ids(self.model, self.tokenizer.eos_token_id)
        ended = fmean(int(row[-1]) in ends for row in rows)
        return Look({"reward": fmean(rewards), "kl": kl, "ended": ended}, rewards, answers)


def train(
    run: StoriesRun,
    ppo: PPOConfig,
    reward: Reward,
    *,
    judge: Reward | None = None,
    facts: Mapping[str, float] | None = None,
    make_trainer: Callable[..., PPOTrainer] = PPOTrainer,
) -> Path:
    """Trains, evaluates before and after, and writes the run's folder. Every process calls this function.

    Args:
        run: The settings of the experiment.
        ppo: The settings of PPO.
        reward: From texts to one reward each.
        judge: The reward of the evaluated answers. None: `reward`.
        facts: Numbers that the summary holds besides.
        make_trainer: Called as PPOTrainer(config, model, tokenizer=..., dataset=...), for another optimizer or a
            subclass.

    Returns:
        The run's folder.
    """
    set_seed(ppo.seed)
    judge = judge or reward
    ppo = replace(ppo, model_name=run.model)  # for the tracker's config
    policy, tokenizer = load(run.model)
    dataset = prompts(tokenizer, openings("train"))
    if run.stops:
        end_at(policy, tokenizer, run.stops)
    trainer = make_trainer(ppo, policy, tokenizer=tokenizer, dataset=dataset)
    is_main = trainer.accelerator.is_main_process
    folder = Path(ppo.output_dir or Path("runs", ppo.exp_name))
    if is_main:
        open_folder(folder, to_flat_dict(run, ppo), goes_on=bool(run.resume_from))
    evaluation = Evaluation(policy.pretrained_model, tokenizer, judge, run, seed=ppo.seed)
    trainer.run.about = to_flat_dict(run)
    _, first_answers = evaluation.answers()
    if is_main:
        show("before training", evaluation.prompts[: run.samples], first_answers[: run.samples])
    learn(trainer, run, reward, folder, evaluation)
    after = evaluation.look()
    if is_main:
        show("after training", evaluation.prompts[: run.samples], after.answers[: run.samples])
        rewards_before = judge(first_answers)
        write_per_prompt(folder, {"reward_before": rewards_before, "reward": after.rewards})
        samples = write_answers(folder, evaluation.prompts, first_answers, after.answers, after.rewards, run.samples)
        # Not before training: a run that is resumed takes up its tracker's run there.
        rows = zip(*samples.values(), strict=True)
        trainer.tracker.table("samples", list(samples), rows, trainer.steps_done)
        means = {"reward_before": fmean(rewards_before), **after.numbers}
        history = read_history(folder)
        points = [(0.0, means["reward_before"]), (after.numbers["kl"], after.numbers["reward"])]
        points += [(row[EVAL_KL], row[EVAL_REWARD]) for row in history if EVAL_KL in row]
        summary = means | {"kl_held": held_kl(history), **rewards_within(points), **(facts or {})}
        if judge is sentiment:
            summary |= efficiency_at_end(vars(run), means)
        trainer.tracker.finish({f"final/{name}": value for name, value in summary.items()})
        close_folder(folder, summary)
    return folder


def held_kl(history: Sequence[Mapping[str, float]]) -> float:
    """The mean KL of the last third of the steps, in nats per response."""
    return fmean(row[KL] for row in history[-max(1, len(history) // 3) :])


def learn(
    trainer: PPOTrainer,
    run: StoriesRun,
    reward: Reward,
    folder: Path,
    evaluation: Evaluation,
) -> None:
    """Runs PPO's steps; evaluates every `look_every`, and writes each step to history.jsonl."""

    def on_step(step: int, stats: Mapping[str, Any], batch: Mapping[str, Any]) -> None:
        row = numbers_in(stats)
        if run.look_every and step % run.look_every == 0 and step < trainer.config.steps:
            row |= {f"eval_{name}": value for name, value in evaluation.look().numbers.items()}
        if not trainer.accelerator.is_main_process:
            return
        append(folder, {"step": step, **row})

    trainer.train(
        lambda queries, responses, **columns: reward(responses),
        generation_kwargs={"max_new_tokens": run.max_new_tokens, "temperature": run.sampling_temperature},
        resume_from=run.resume_from,
        on_step=on_step,
    )
