"""PPO on the reward that labels DPO's pairs, for the comparison of their frontiers. See README.md."""

from collections.abc import Sequence
from pathlib import Path

from experiments.run_folders import from_recipe
from experiments.sentiment import sentiment
from experiments.sentiment_ppo import StoriesRun, train
from trimtab_lm import PPOConfig

RECIPE = Path(__file__).with_name("recipe_ppo.yaml")


def main(run: StoriesRun, ppo: PPOConfig) -> None:
    """Trains, and evaluates reward and KL on held-out prompts."""
    train(run, ppo, sentiment)


def settings(argv: Sequence[str] | None = None, **changes: object) -> tuple[StoriesRun, PPOConfig]:
    """The settings of a run: see `from_recipe`."""
    return from_recipe(RECIPE, StoriesRun, PPOConfig, argv=argv, **changes)


if __name__ == "__main__":
    main(*settings())
