"""Best of n, learnt: round after round the model samples, keeps its best text of each prompt, and fine-tunes on those.

This is RAFT (Dong et al. 2023, arXiv:2304.06767). A small model of children's stories learns to tell happy ones; the
best text is the one with the highest sentiment by VADER.

    python examples/iterative_sft.py             # a few minutes on two cores; --help lists every setting
    python examples/iterative_sft.py --smoke     # two small rounds
    python examples/iterative_sft.py --model gpt2 --samples 16

You see the sentiment of the kept texts rise from round to round.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import torch
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from trimtab_common.config import parse_config
from trimtab_lm import BestOfNSampler, IterativeSFTConfig, IterativeSFTTrainer

SETTINGS = {"output_dir": "runs/examples/iterative_sft", "report_to": "none", "save_strategy": "no"}
SETTINGS |= {"per_device_train_batch_size": 8, "learning_rate": 3e-4, "lr_scheduler_type": "constant"}
SETTINGS |= {"disable_tqdm": True}
SMOKE = {"rounds": 2, "samples": 2, "max_new_tokens": 8, "prompts": 4}
HEROES = ("little dog", "boy named Tim", "girl named Lily", "brown bear", "big cat", "bird", "king", "funny frog")
PLACES = ("in the park", "at home", "by the sea", "in the woods", "at school", "on a farm")
SENTIMENT = SentimentIntensityAnalyzer()


@dataclass(frozen=True)
class RunConfig:
    """The settings that IterativeSFTConfig does not have."""

    model: str = field(default=str(Path(__file__).with_name("stories")), metadata={"help": "Folder or hub id."})
    rounds: int = field(default=10, metadata={"help": "Times that the model samples and learns."})
    prompts: int = field(default=48, metadata={"help": "Prompts of a round."})
    samples: int = field(default=8, metadata={"help": "Samples for each prompt; the policy learns the best one."})
    max_new_tokens: int = field(default=24, metadata={"help": "Tokens of a text after its prompt, at most."})
    smoke: bool = field(default=False, metadata={"help": "Two small rounds, to see that it runs."})


def happiness(texts: list[str]) -> list[float]:
    """VADER's sentiment of each text, from -1 to 1."""
    return [SENTIMENT.polarity_scores(text)["compound"] for text in texts]


def main(run: RunConfig, config: IterativeSFTConfig) -> None:
    """Samples and learns, round after round."""
    trainer = IterativeSFTTrainer(run.model, config)
    sampler = BestOfNSampler(
        trainer.model,
        trainer.tokenizer,
        happiness,
        length_sampler=lambda: run.max_new_tokens,
        sample_size=run.samples,
        seed=config.seed,
    )
    prompts = [f"Once there was a {hero} {place}." for place in PLACES for hero in HEROES][: run.prompts]
    queries = [torch.tensor(trainer.tokenizer(prompt)["input_ids"]) for prompt in prompts]
    if config.resume_from_checkpoint:
        trainer.train(config.resume_from_checkpoint)
        sampler.calls = trainer.progress.calls
    for number in range(trainer.progress.calls, run.rounds):
        answers = [best for (best,) in sampler.generate_ids(queries)]
        pairs = list(zip(queries, answers, strict=True))
        labels = [torch.cat([torch.full_like(query, -100), answer]) for query, answer in pairs]
        stats = trainer.step([torch.cat(pair) for pair in pairs], labels=labels)
        texts = trainer.tokenizer.batch_decode(answers, skip_special_tokens=True)
        print(f"round {number + 1}: sentiment {fmean(happiness(texts)):+.3f}, loss {stats['loss']:.3f}", flush=True)


if __name__ == "__main__":
    recipe = SETTINGS | SMOKE if "--smoke" in sys.argv else SETTINGS
    main(*parse_config(RunConfig, IterativeSFTConfig, description=__doc__, recipe=recipe))
