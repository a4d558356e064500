"""PPO on the reward that labels DPO's pairs, for the comparison of their frontiers. See README.md."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments.runs import from_recipe
from experiments.sentiment import sentiment
from experiments.sentiment_ppo import Evaluation, StoriesRun, train
from trimtab_lm import PPOConfig

RECIPE = Path(__file__).with_name("recipe_ppo.yaml")


@dataclass(frozen=True)
class RunConfig(StoriesRun):
    """The model, and how often the policy is evaluated."""

    look_every: int = field(default=4, metadata={"help": "PPO steps between two evaluations of reward and KL."})


def main(run: RunConfig, ppo: PPOConfig) -> None:
    """Trains, and evaluates reward and KL on held-out prompts."""

    def on_step(step: int, row: dict[str, float], evaluation: Evaluation) -> None:
        if step % run.look_every == 0 and step < ppo.steps:
            numbers, _ = evaluation.look()
            row |= {f"eval_{name}": value for name, value in numbers.items()}

    train(run, ppo, sentiment, on_step=on_step)


def settings(argv: Sequence[str] | None = None, **changes: object) -> tuple[RunConfig, PPOConfig]:
    """The settings of a run: see `from_recipe`."""
    return from_recipe(RECIPE, RunConfig, PPOConfig, argv=argv, **changes)


if __name__ == "__main__":
    main(*settings())
