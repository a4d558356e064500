"""GRPO with a reward function: a small model of children's stories learns to tell happy ones.

Each prompt gets num_generations completions. What a completion is worth is its reward, less the mean of its group. The
reward is VADER's sentiment of the completion.

    python examples/grpo.py             # a few minutes on two cores; --help lists every setting
    python examples/grpo.py --smoke     # two small steps
    python examples/grpo.py --model gpt2 --num_generations 16 --beta 0.04

You see the reward of prompts that training never shows, before and after.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from trimtab_common.config import parse_config
from trimtab_lm import GRPOConfig, GRPOTrainer

SETTINGS = {"output_dir": "runs/examples/grpo", "report_to": "none", "save_strategy": "no", "logging_steps": 5}
SETTINGS |= {"max_steps": 60, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 8, "beta": 0.01}
SETTINGS |= {"num_generations": 8, "max_completion_length": 24, "learning_rate": 3e-4, "disable_tqdm": True}
SMOKE = {"max_steps": 2, "logging_steps": 1, "num_generations": 4, "max_completion_length": 8}
HEROES = ("little dog", "boy named Tim", "girl named Lily", "brown bear", "big cat", "bird", "king", "funny frog")
PLACES = ("in the park", "at home", "by the sea", "in the woods", "at school", "on a farm")
SENTIMENT = SentimentIntensityAnalyzer()


@dataclass(frozen=True)
class RunConfig:
    """The settings that GRPOConfig does not have."""

    model: str = field(default=str(Path(__file__).with_name("stories")), metadata={"help": "Folder or hub id."})
    smoke: bool = field(default=False, metadata={"help": "Two small steps, to see that it runs."})


def happiness(completions: Sequence[str], **columns: object) -> list[float]:
    """VADER's sentiment of each completion, from -1 to 1."""
    return [SENTIMENT.polarity_scores(completion)["compound"] for completion in completions]


def main(run: RunConfig, config: GRPOConfig) -> None:
    """Trains on the prompts of all places except the last, and evaluates on the last place's prompts."""
    train, test = (
        Dataset.from_dict({"prompt": [f"Once there was a {hero} {place}." for place in places for hero in HEROES]})
        for places in (PLACES[:-1], PLACES[-1:])
    )
    trainer = GRPOTrainer(run.model, reward_funcs=happiness, args=config, train_dataset=train, eval_dataset=test)
    before = trainer.evaluate()["eval_reward"]
    trainer.train(config.resume_from_checkpoint)
    after = trainer.evaluate()["eval_reward"]
    print(f"reward of {len(test)} held-out prompts: {before:+.3f} -> {after:+.3f}")


if __name__ == "__main__":
    recipe = SETTINGS | SMOKE if "--smoke" in sys.argv else SETTINGS
    main(*parse_config(RunConfig, GRPOConfig, description=__doc__, recipe=recipe))
