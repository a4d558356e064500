"""KTO on people's ratings: a small model of children's stories learns happy words from single answers, without pairs.

Ten people rated each word of VADER's lexicon between -4 and 4. An answer is desirable if it ends in a word that they
rated above 1, and undesirable if below -1. The held-out answers have words that training never shows.

    python examples/kto.py             # a minute on two cores; --help lists every setting
    python examples/kto.py --smoke     # four small steps
    python examples/kto.py --loss_type apo_zero_unpaired

You see by how much more than the reference the policy likes happy words, as the margin of implicit rewards: above 0, on
words that it was not trained on too.
"""

import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from trimtab_common.config import parse_config
from trimtab_lm import KTOConfig, KTOTrainer

SETTINGS = {"output_dir": "runs/examples/kto", "report_to": "none", "save_strategy": "no", "logging_steps": 20}
SETTINGS |= {"max_steps": 100, "per_device_train_batch_size": 16, "per_device_eval_batch_size": 32, "beta": 0.1}
SETTINGS |= {"learning_rate": 3e-4, "max_length": 64, "desirable_weight": 1.3, "disable_tqdm": True}
SMOKE = {"max_steps": 4, "logging_steps": 2, "per_device_train_batch_size": 4, "eval_answers": 16}


@dataclass(frozen=True)
class RunConfig:
    """The settings that KTOConfig does not have."""

    model: str = field(default=str(Path(__file__).with_name("stories")), metadata={"help": "Folder or hub id."})
    eval_answers: int = field(default=400, metadata={"help": "Answers held out for the evaluation."})
    smoke: bool = field(default=False, metadata={"help": "Four small steps, to see that it runs."})


def rated_answers() -> Dataset:
    """Columns prompt, completion and label, True for happy words."""
    ratings = {word: rating for word, rating in SentimentIntensityAnalyzer().lexicon.items() if word.isalpha()}
    rows = [
        {"prompt": "The story was", "completion": f" {word}.", "label": ratings[word] > 1}
        for word in sorted(ratings)
        if abs(ratings[word]) > 1
    ]
    random.Random(0).shuffle(rows)
    return Dataset.from_list(rows)


def main(run: RunConfig, config: KTOConfig) -> None:
    """Trains the policy against a frozen copy of itself, and evaluates after."""
    data = rated_answers().train_test_split(test_size=run.eval_answers, seed=0)
    trainer = KTOTrainer(
        run.model,
        args=config,
        train_dataset=data["train"],
        eval_dataset=data["test"],
    )
    trainer.train(config.resume_from_checkpoint)
    found = trainer.evaluate()
    print(f"held-out answers: margin {found['eval_rewards/margins']:.3f}, loss {found['eval_loss']:.3f}")


if __name__ == "__main__":
    recipe = SETTINGS | SMOKE if "--smoke" in sys.argv else SETTINGS
    main(*parse_config(RunConfig, KTOConfig, description=__doc__, recipe=recipe))
