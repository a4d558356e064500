"""PPO towards positive continuations (Ziegler et al. 2019, arXiv:1909.08593). Claim, cost and numbers: README.md."""

from collections.abc import Sequence
from pathlib import Path

from accelerate import PartialState

from experiments.reports import report_on_run
from experiments.runs import from_recipe
from experiments.sentiment import sentiment
from experiments.sentiment_ppo import StoriesRun, train
from experiments.ziegler_2019_sentiment.report import CLAIM, TITLE, read
from trimtab_lm import PPOConfig

RECIPE = Path(__file__).with_name("recipe.yaml")


def main(run: StoriesRun, ppo: PPOConfig) -> None:
    """Trains, and writes the report of this run into its folder, unless it belongs to a sweep."""
    folder = train(run, ppo, sentiment)
    if PartialState().is_main_process:
        report_on_run(TITLE, CLAIM, read, [folder])
        if (figure := folder / "figure.png").exists():
            print(f"figure: {figure}")


def settings(argv: Sequence[str] | None = None, **changes: object) -> tuple[StoriesRun, PPOConfig]:
    """The settings of a run: see `from_recipe`."""
    return from_recipe(RECIPE, StoriesRun, PPOConfig, argv=argv, **changes)


if __name__ == "__main__":
    main(*settings())
