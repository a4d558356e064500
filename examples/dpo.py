"""DPO on people's ratings: a small model of children's stories learns to prefer happy words to sad ones.

Ten people rated each word of VADER's lexicon between -4 and 4. The chosen answer ends in a word that they rated above
1, the rejected one in a word that they rated below -1. The held-out pairs have words that training never shows.

    python examples/dpo.py             # a minute on two cores; --help lists every setting
    python examples/dpo.py --smoke     # four small steps
    python examples/dpo.py --model gpt2 --beta 0.5 --loss_type ipo

You see how often the policy prefers the chosen answer by more than the reference does: above one half, on words that it
was not trained on too.
"""

import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

from trimtab_common.config import parse_config
from trimtab_lm import DPOConfig, DPOTrainer

SETTINGS = {"output_dir": "runs/examples/dpo", "report_to": "none", "save_strategy": "no", "logging_steps": 20}
SETTINGS |= {"max_steps": 100, "per_device_train_batch_size": 16, "per_device_eval_batch_size": 32, "beta": 0.1}
SETTINGS |= {"learning_rate": 3e-4, "max_length": 64, "max_prompt_length": 32, "disable_tqdm": True}
SMOKE = {"max_steps": 4, "logging_steps": 2, "per_device_train_batch_size": 4, "eval_pairs": 16}


@dataclass(frozen=True)
class RunConfig:
    """The settings that DPOConfig does not have."""

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


def main(run: RunConfig, config: DPOConfig) -> None:
    """Trains the policy against a frozen copy of itself, and evaluates after."""
    data = rated_pairs().train_test_split(test_size=run.eval_pairs, seed=0)
    trainer = DPOTrainer(
        run.model,
        args=config,
        train_dataset=data["train"],
        eval_dataset=data["test"],
    )
    trainer.train(config.resume_from_checkpoint)
    found = trainer.evaluate()
    print(f"held-out pairs: accuracy {found['eval_rewards/accuracies']:.3f}, loss {found['eval_loss']:.3f} nats")


if __name__ == "__main__":
    recipe = SETTINGS | SMOKE if "--smoke" in sys.argv else SETTINGS
    main(*parse_config(RunConfig, DPOConfig, description=__doc__, recipe=recipe))
