"""DPO on sentiment (Rafailov et al. 2023, arXiv:2305.18290, section 6.1). What you should see: README.md."""

from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset

from experiments.rafailov_2023_dpo_frontier.pairs import PAPER, Pair, RunConfig, follow, learnt, load, pairs_of
from experiments.run_folders import begin, from_recipe
from experiments.sentiment import sentiment
from experiments.sentiment_ppo import Evaluation
from trimtab_lm.dpo import DPOConfig, DPOTrainer

RECIPE = Path(__file__).with_name("recipe.yaml")
PANELS = {
    "reward (VADER, -1 to 1)": ["eval_reward"],
    "KL to the reference (nats per response)": ["eval_kl"],
    "accuracy of the implicit reward": ["rewards/accuracies"],
    "loss": ["loss"],
}


def columns(pair: Pair, *, ignored: int) -> dict[str, list[int]]:
    """Returns a tokenized row for DPOTrainer."""
    sides = {side: learnt(pair["prompt"], pair[side], ignored=ignored) for side in ("chosen", "rejected")}
    prompt = {"prompt_input_ids": pair["prompt"], "prompt_attention_mask": [1] * len(pair["prompt"])}
    return prompt | {f"{side}_{name}": ids for side, row in sides.items() for name, ids in row.items()}


def main(run: RunConfig, dpo: DPOConfig) -> None:
    """Samples pairs, trains on them, and evaluates reward and KL on held-out prompts."""
    history = begin(PAPER, run, dpo)
    model, tokenizer = load(run.model)
    evaluation = Evaluation(model.to(dpo.device), tokenizer, sentiment, run, seed=dpo.seed)
    pairs = pairs_of(model, tokenizer, run, seed=dpo.seed)
    train = Dataset.from_list([columns(pair, ignored=dpo.label_pad_token_id) for pair in pairs])
    trainer = DPOTrainer(model, None, dpo, train_dataset=train, processing_class=tokenizer, callbacks=[history])
    scored = run.prompts * run.per_prompt
    if trainer.is_world_process_zero():
        print(f"{len(train)} pairs out of {scored} continuations")
    title = f"{dpo.loss_type}: {run.model}, beta = {dpo.beta:g}"
    follow(trainer, evaluation, run, scored_texts=scored, title=title, panels=PANELS)


def settings(argv: Sequence[str] | None = None, **changes: object) -> tuple[RunConfig, DPOConfig]:
    """The settings of a run: see `from_recipe`."""
    return from_recipe(RECIPE, RunConfig, DPOConfig, argv=argv, **changes)


if __name__ == "__main__":
    main(*settings())
