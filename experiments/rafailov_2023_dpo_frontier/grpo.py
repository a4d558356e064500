"""GRPO on the reward that labels DPO's pairs, for the comparison of their frontiers. See README.md."""

from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset

from experiments.assets import openings
from experiments.rafailov_2023_dpo_frontier.pairs import PAPER, LookConfig, follow, load
from experiments.run_folders import begin, from_recipe
from experiments.sentiment import sentiment
from experiments.sentiment_ppo import Evaluation
from trimtab_lm.grpo import GRPOConfig, GRPOTrainer

RECIPE = Path(__file__).with_name("recipe_grpo.yaml")
PANELS = {
    "reward (VADER, -1 to 1)": ["reward", "eval_reward"],
    "KL to the reference (nats per response)": ["eval_kl"],
}


def main(run: LookConfig, grpo: GRPOConfig) -> None:
    """Trains, and evaluates reward and KL on held-out prompts."""
    if grpo.max_completion_length != run.max_new_tokens:
        raise ValueError(
            f"max_completion_length={grpo.max_completion_length}, max_new_tokens={run.max_new_tokens}: training and "
            "evaluation need answers of one length. Give both the same number."
        )
    history = begin(PAPER, run, grpo)
    model, tokenizer = load(run.model)
    evaluation = Evaluation(model.to(grpo.device), tokenizer, sentiment, run, seed=grpo.seed)
    train = Dataset.from_dict({"prompt": openings("train")})
    trainer = GRPOTrainer(model, sentiment, grpo, train, processing_class=tokenizer, callbacks=[history])
    prompts = grpo.per_device_train_batch_size * grpo.gradient_accumulation_steps * grpo.world_size * grpo.max_steps
    scored = prompts * grpo.num_generations
    follow(trainer, evaluation, run, scored_texts=scored, title=f"GRPO: {run.model}", panels=PANELS)


def settings(argv: Sequence[str] | None = None, **changes: object) -> tuple[LookConfig, GRPOConfig]:
    """The settings of a run: see `from_recipe`."""
    return from_recipe(RECIPE, LookConfig, GRPOConfig, argv=argv, **changes)


if __name__ == "__main__":
    main(*settings())
