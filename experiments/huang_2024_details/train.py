"""PPO with the details of Huang et al. 2024 (arXiv:2403.17031); a setting leaves out each. See README.md."""

from collections.abc import Sequence

from accelerate import PartialState

from experiments.huang_2024_details.details import RECIPE, DetailsPPOConfig, make_trainer
from experiments.huang_2024_details.report import CLAIM, TITLE, read
from experiments.reports import report_on_run
from experiments.run_folders import from_recipe
from experiments.sentiment import sentiment
from experiments.sentiment_ppo import StoriesRun, train


def main(run: StoriesRun, ppo: DetailsPPOConfig) -> None:
    """Trains, and writes the report of this run into its folder, unless it belongs to a sweep."""
    folder = train(run, ppo, sentiment, make_trainer=make_trainer)
    if PartialState().is_main_process:
        report_on_run(TITLE, CLAIM, read, [folder])


def settings(argv: Sequence[str] | None = None, **changes: object) -> tuple[StoriesRun, DetailsPPOConfig]:
    """The settings of a run: see `from_recipe`."""
    return from_recipe(RECIPE, StoriesRun, DetailsPPOConfig, argv=argv, **changes)


if __name__ == "__main__":
    main(*settings())
