"""PPO with the loop in your own hands: generate, score, step, log_stats.

A small model of children's stories learns to tell happy ones. The reward is VADER's sentiment of each continuation.

    python examples/ppo.py             # a few minutes on two cores; --help lists every setting
    python examples/ppo.py --smoke     # two small steps
    python examples/ppo.py --model gpt2 --steps 200 --log_with wandb

You see the mean score rise, and with it the KL divergence from the model that the run began with, in nats per response.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoTokenizer
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from trimtab_common.config import parse_config
from trimtab_lm import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, set_seed

SETTINGS = {"steps": 40, "batch_size": 32, "mini_batch_size": 16, "learning_rate": 3e-4, "init_kl_coef": 0.05}
SMOKE = {"steps": 2, "batch_size": 8, "mini_batch_size": 4}
HEROES = ("little dog", "boy named Tim", "girl named Lily", "brown bear", "big cat", "bird", "king", "funny frog")
PLACES = ("in the park", "at home", "by the sea", "in the woods", "at school", "on a farm")


@dataclass(frozen=True)
class RunConfig:
    """The settings that PPOConfig does not have."""

    model: str = field(default=str(Path(__file__).with_name("stories")), metadata={"help": "Folder or hub id."})
    max_new_tokens: int = field(default=24, metadata={"help": "Tokens of a response at most."})
    resume_from: str | None = field(default=None, metadata={"help": "Checkpoint folder to go on from."})
    smoke: bool = field(default=False, metadata={"help": "Two small steps, to see that it runs."})


def main(run: RunConfig, config: PPOConfig) -> None:
    """Samples, scores and learns, batch after batch."""
    set_seed(config.seed)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(run.model, v_head_init_strategy="zero")
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trainer = PPOTrainer(config, model, tokenizer=tokenizer)
    if run.resume_from:
        trainer.load_checkpoint(run.resume_from)

    sentiment = SentimentIntensityAnalyzer()
    prompts = [f"Once there was a {hero} {place}." for place in PLACES for hero in HEROES]
    for step in range(trainer.steps_done, config.steps):
        places = range(step * config.batch_size, (step + 1) * config.batch_size)
        texts = [prompts[place % len(prompts)] for place in places]
        queries = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
        responses = trainer.generate(
            queries,
            return_prompt=False,
            batch_size=config.batch_size,
            do_sample=True,
            max_new_tokens=run.max_new_tokens,
        )
        answers = tokenizer.batch_decode(responses, skip_special_tokens=True)
        scores = [torch.tensor(sentiment.polarity_scores(answer)["compound"]) for answer in answers]
        stats = trainer.step(queries, responses, scores)
        trainer.log_stats(stats, {"query": texts, "response": answers}, scores)
        print(
            f"step {step + 1}: score {stats['ppo/mean_scores']:+.3f}, KL {stats['objective/kl']:.2f} nats", flush=True
        )
        if config.save_steps and (step + 1) % config.save_steps == 0:
            trainer.save_checkpoint()
        if step + 1 == config.steps:
            print(f"{texts[0]} [{answers[0].strip()}]")


if __name__ == "__main__":
    recipe = SETTINGS | SMOKE if "--smoke" in sys.argv else SETTINGS
    main(*parse_config(RunConfig, PPOConfig, description=__doc__, recipe=recipe))
