"""SFT on the chosen answers of DPO's pairs, the baseline of its frontier ("Preferred-FT"). See README.md."""

from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset

from experiments.rafailov_2023_dpo_frontier.pairs import PAPER, RunConfig, follow, learnt, load, pairs_of
from experiments.run_folders import begin, from_recipe
from experiments.sentiment import sentiment
from experiments.sentiment_ppo import Evaluation
from trimtab_lm.sft import SFTConfig, SFTTrainer

RECIPE = Path(__file__).with_name("recipe_sft.yaml")
PANELS = {
    "reward (VADER, -1 to 1)": ["eval_reward"],
    "KL to the reference (nats per response)": ["eval_kl"],
    "loss (nats per token)": ["loss"],
}


def main(run: RunConfig, sft: SFTConfig) -> None:
    """Samples pairs, trains on the chosen answers, and evaluates reward and KL on held-out prompts."""
    history = begin(PAPER, run, sft)
    model, tokenizer = load(run.model)
    evaluation = Evaluation(model.to(sft.device), tokenizer, sentiment, run, seed=sft.seed)
    pairs = pairs_of(model, tokenizer, run, seed=sft.seed)
    train = Dataset.from_list([learnt(pair["prompt"], pair["chosen"]) for pair in pairs])
    trainer = SFTTrainer(model, args=sft, train_dataset=train, processing_class=tokenizer, callbacks=[history])
    scored = run.prompts * run.per_prompt
    if trainer.is_world_process_zero():
        print(f"{len(train)} answers out of {scored} continuations")
    title = f"SFT on the chosen: {run.model}"
    follow(trainer, evaluation, run, scored_texts=scored, title=title, panels=PANELS)


def settings(argv: Sequence[str] | None = None, **changes: object) -> tuple[RunConfig, SFTConfig]:
    """The settings of a run: see `from_recipe`."""
    return from_recipe(RECIPE, RunConfig, SFTConfig, argv=argv, **changes)


if __name__ == "__main__":
    main(*settings())
