"""PPO without a loop of your own: a dataset of prompts, a reward function, and train().

The same task as ppo.py: a small model of children's stories learns to tell happy ones.

    python examples/ppo_train.py             # a few minutes on two cores; --help lists every setting
    python examples/ppo_train.py --smoke     # two small steps
    python examples/ppo_train.py --output_dir runs/happy --save_steps 10     # writes checkpoints
    python examples/ppo_train.py --output_dir runs/happy --save_steps 10 --resume_from latest

You see the mean score rise, and with it the KL divergence from the model that the run began with, in nats per response.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from trimtab_common.config import parse_config
from trimtab_lm import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, set_seed

SETTINGS = {"steps": 40, "batch_size": 32, "mini_batch_size": 16, "learning_rate": 3e-4, "init_kl_coef": 0.05}
SMOKE = {"steps": 2, "batch_size": 8, "mini_batch_size": 4}
HEROES = ("little dog", "boy named Tim", "girl named Lily", "brown bear", "big cat", "bird", "king", "funny frog")
PLACES = ("in the park", "at home", "by the sea", "in the woods", "at school", "on a farm")
SENTIMENT = SentimentIntensityAnalyzer()


@dataclass(frozen=True)
class RunConfig:
    """The settings that PPOConfig does not have."""

    model: str = field(default=str(Path(__file__).with_name("stories")), metadata={"help": "Folder or hub id."})
    max_new_tokens: int = field(default=24, metadata={"help": "Tokens of a response at most."})
    resume_from: str | None = field(default=None, metadata={"help": "Checkpoint folder, or latest."})
    smoke: bool = field(default=False, metadata={"help": "Two small steps, to see that it runs."})


def happiness(queries: Sequence[str], responses: Sequence[str], **columns: object) -> list[float]:
    """VADER's sentiment of each response, from -1 to 1."""
    return [SENTIMENT.polarity_scores(response)["compound"] for response in responses]


def report(step: int, stats: dict[str, float], batch: dict[str, Sequence[str]]) -> None:
    """Prints the numbers of a step."""
    print(f"step {step}: score {stats['ppo/mean_scores']:+.3f}, KL {stats['objective/kl']:.2f} nats", flush=True)


def main(run: RunConfig, config: PPOConfig) -> None:
    """Trains on a dataset of tokenized prompts."""
    set_seed(config.seed)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(run.model, v_head_init_strategy="zero")
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    prompts = [f"Once there was a {hero} {place}." for place in PLACES for hero in HEROES]
    dataset = Dataset.from_dict({"query": prompts, "input_ids": tokenizer(prompts)["input_ids"]})
    trainer = PPOTrainer(config, model, tokenizer=tokenizer, dataset=dataset)
    trainer.train(
        happiness,
        generation_kwargs={"max_new_tokens": run.max_new_tokens},
        resume_from=run.resume_from,
        on_step=report,
    )


if __name__ == "__main__":
    recipe = SETTINGS | SMOKE if "--smoke" in sys.argv else SETTINGS
    main(*parse_config(RunConfig, PPOConfig, description=__doc__, recipe=recipe))
