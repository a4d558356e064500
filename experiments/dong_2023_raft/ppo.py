"""PPO on RAFT's task, with as many samples: the paper's baseline. See README.md."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.assets import openings
from experiments.dong_2023_raft.measures import DISTINCT, NATS, add_results, distinct, nats_per_token
from experiments.evaluation import continued
from experiments.run_folders import from_recipe
from experiments.sentiment import sentiment
from experiments.sentiment_ppo import StoriesRun, load, train
from trimtab_lm import PPOConfig, PPOTrainer

RECIPE = Path(__file__).with_name("recipe_ppo.yaml")


def main(run: StoriesRun, ppo: PPOConfig) -> None:
    """Trains on one process, and measures reward, fluency and diversity on held-out prompts."""
    policies = []

    def make_trainer(config: PPOConfig, policy: Any, **others: Any) -> PPOTrainer:
        policies.append(policy)
        return PPOTrainer(config, policy, **others)

    folder = train(run, ppo, sentiment, make_trainer=make_trainer)
    reference, tokenizer = load(run.model)
    prompts = openings(run.eval_split)[: run.eval_prompts]
    # The seed of the evaluation after training: the answers are those whose rewards it wrote.
    rows, answers = continued(
        policies[0].pretrained_model, tokenizer, prompts, max_new_tokens=run.max_new_tokens, seed=ppo.seed
    )
    nats = nats_per_token(reference.pretrained_model, tokenizer, prompts, rows)
    add_results(folder, per_prompt={NATS: nats}, summary={DISTINCT: distinct(answers, 2)})


def settings(argv: Sequence[str] | None = None, **changes: object) -> tuple[StoriesRun, PPOConfig]:
    """The settings of a run: see `from_recipe`."""
    return from_recipe(RECIPE, StoriesRun, PPOConfig, argv=argv, **changes)


if __name__ == "__main__":
    main(*settings())
