"""A reward model from people's ratings: which of two words is the happier end of a sentence?

Ten people rated each word of VADER's lexicon between -4 and 4. A pair is a word that they rated above 1 and a word that
they rated below -1. The held-out pairs have words that training never shows.

    python examples/reward.py             # a minute on two cores; --help lists every setting
    python examples/reward.py --smoke     # four small steps
    python examples/reward.py --model gpt2 --per_device_train_batch_size 16

You see the accuracy on held-out pairs rise above one half, the accuracy of guessing.
"""

import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from trimtab_common.config import parse_config
from trimtab_lm import RewardConfig, RewardTrainer

SETTINGS = {"output_dir": "runs/examples/reward", "report_to": "none", "save_strategy": "no", "logging_steps": 20}
SETTINGS |= {"max_steps": 200, "per_device_train_batch_size": 32, "per_device_eval_batch_size": 32}
SETTINGS |= {"learning_rate": 1e-3, "max_length": 32, "disable_tqdm": True}
SMOKE = {"max_steps": 4, "logging_steps": 2, "per_device_train_batch_size": 8, "eval_pairs": 16}


@dataclass(frozen=True)
class RunConfig:
    """The settings that RewardConfig does not have."""

    model: str = field(default=str(Path(__file__).with_name("stories")), metadata={"help": "Folder or hub id."})
    eval_pairs: int = field(default=200, metadata={"help": "Pairs held out for the evaluation."})
    smoke: bool = field(default=False, metadata={"help": "Four small steps, to see that it runs."})


def rated_pairs() -> Dataset:
    """Columns prompt, chosen and rejected; no word is in two pairs."""
    ratings = {word: rating for word, rating in SentimentIntensityAnalyzer().lexicon.items() if word.isalpha()}
    happy = sorted(word for word, rating in ratings.items() if rating > 1)
    sad = sorted(word for word, rating in ratings.items() if rating < -1)
    random.Random(0).shuffle(happy)
    random.Random(1).shuffle(sad)
    pairs = zip(happy, sad, strict=False)
    return Dataset.from_list(
        [{"prompt": "The story was", "chosen": f" {good}.", "rejected": f" {bad}."} for good, bad in pairs]
    )


def main(run: RunConfig, config: RewardConfig) -> None:
    """Trains a model with a score head, and evaluates before and after."""
    data = rated_pairs().train_test_split(test_size=run.eval_pairs, seed=0)
    trainer = RewardTrainer(
        run.model,
        config,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=AutoTokenizer.from_pretrained(run.model),
    )
    before = trainer.evaluate()["eval_accuracy"]
    trainer.train(config.resume_from_checkpoint)
    after = trainer.evaluate()["eval_accuracy"]
    print(f"accuracy on {run.eval_pairs} held-out pairs: {before:.3f} -> {after:.3f}")


if __name__ == "__main__":
    recipe = SETTINGS | SMOKE if "--smoke" in sys.argv else SETTINGS
    main(*parse_config(RunConfig, RewardConfig, description=__doc__, recipe=recipe))
