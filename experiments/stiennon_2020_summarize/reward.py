"""The second stage of Stiennon et al. 2020 (arXiv:2009.01325), a model of preferences. What to expect: README.md."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer

from experiments.assets import imdb_reviews, model_folder, preferences
from experiments.run_folders import begin, finish, from_recipe
from trimtab_lm.reward import RewardConfig, RewardTrainer

PAPER = "stiennon_2020_summarize"
RECIPE = Path(__file__).with_name("recipe_reward.yaml")
PANELS = {"accuracy": ["accuracy", "eval_accuracy"], "loss": ["loss", "eval_loss"]}


@dataclass(frozen=True)
class RunConfig:
    """The model, and the pairs."""

    model: str = field(
        default="stories15m",
        metadata={"help": "stories15m or smollm2, which are downloaded; or hub id or folder of a causal model."},
    )
    data: str = field(
        default="imdb",
        metadata={
            "help": "imdb: a positive review against a negative one. gpt4 or claude: answers to instructions, as "
            "these judged them for AlpacaEval (needs an instruct model and max_length)."
        },
    )
    words: int = field(default=50, metadata={"help": "How many last words of a review to read (imdb)."})
    train_pairs: int | None = field(default=4000, metadata={"help": "Pairs to learn from. None: all."})
    eval_pairs: int | None = field(default=400, metadata={"help": "Other pairs, for the accuracy. None: all."})


def review_pairs(reviews: Iterable[dict[str, str | int]], words: int) -> Dataset:
    """Pairs positive reviews with negative ones; keeps the last words of each, where the verdict is."""
    sides: dict[int, list[str]] = {0: [], 1: []}
    for review in reviews:
        sides[int(review["label"])].append(" ".join(str(review["text"]).split()[-words:]))
    pairs = zip(sides[1], sides[0], strict=False)
    return Dataset.from_list([{"chosen": chosen, "rejected": rejected} for chosen, rejected in pairs])


def pairs(run: RunConfig) -> tuple[Dataset, Dataset]:
    """Pairs to learn from, and others."""
    if run.data == "imdb":
        every = review_pairs(imdb_reviews(), run.words).train_test_split(test_size=0.1, shuffle=False)
    else:
        every = preferences(run.data)
    train, test = every["train"], every["test"]
    train = train.select(range(min(run.train_pairs or len(train), len(train))))
    return train, test.select(range(min(run.eval_pairs or len(test), len(test))))


def main(run: RunConfig, reward: RewardConfig) -> None:
    """Trains, and prints the accuracy on held-out pairs before and after."""
    history = begin(PAPER, run, reward)
    name = model_folder(run.model)
    train, test = pairs(run)
    tokenizer = AutoTokenizer.from_pretrained(name)
    trainer = RewardTrainer(
        name, reward, train_dataset=train, eval_dataset=test, processing_class=tokenizer, callbacks=[history]
    )
    before = trainer.evaluate()
    trainer.train(resume_from_checkpoint=reward.resume_from_checkpoint)
    after = trainer.evaluate()
    first, last = before["eval_accuracy"], after["eval_accuracy"]
    if trainer.is_world_process_zero():
        print(f"\naccuracy on {len(trainer.eval_dataset)} other pairs: {first:.3f} -> {last:.3f}   ", end="")
        print(f"higher: {'yes' if last > first else 'NO'}")
        print(f"mean margin: {before['eval_scores/margin']:+.2f} -> {after['eval_scores/margin']:+.2f}   ", end="")
        print(f"calibration error: {before['eval_calibration_error']:.3f} -> {after['eval_calibration_error']:.3f}")
    finish(trainer, f"Reward model: {run.model}, {run.data}", PANELS, {"accuracy_before": first, "accuracy": last})


def settings(argv: Sequence[str] | None = None, **changes: object) -> tuple[RunConfig, RewardConfig]:
    """The settings of a run: see `from_recipe`."""
    return from_recipe(RECIPE, RunConfig, RewardConfig, argv=argv, **changes)


if __name__ == "__main__":
    main(*settings())
