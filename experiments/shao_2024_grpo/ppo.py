"""PPO with a value head on the sums of GRPO, after equally many answers. See README.md."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.run_folders import append, close_folder, from_recipe, numbers_in, open_folder
from experiments.sentiment_ppo import load, prompts
from experiments.shao_2024_grpo.answers import right
from experiments.shao_2024_grpo.train import SumsConfig, look, sums, write
from trimtab_common.config import to_flat_dict
from trimtab_lm import PPOConfig, PPOTrainer, set_seed

RECIPE = Path(__file__).with_name("recipe_ppo.yaml")


@dataclass(frozen=True)
class RunConfig(SumsConfig):
    """The length of an answer."""

    method: str = field(default="ppo", metadata={"help": "The name of these runs in the report."})
    max_new_tokens: int = field(default=3, metadata={"help": "Tokens of an answer at most."})


def main(run: RunConfig, ppo: PPOConfig) -> None:
    """Trains, and computes the share of right answers to the evaluated sums."""
    set_seed(ppo.seed)
    policy, tokenizer = load(run.model)
    data = sums(run, seed=0)
    dataset = prompts(tokenizer, data["train"]["prompt"]).add_column("answer", data["train"]["answer"])
    trainer = PPOTrainer(replace(ppo, model_name=run.model), policy, tokenizer=tokenizer, dataset=dataset)
    folder, is_main = Path(ppo.output_dir or Path("runs", ppo.exp_name)), trainer.accelerator.is_main_process
    if is_main:
        open_folder(folder, to_flat_dict(run, ppo), goes_on=False)

    def on_step(step: int, stats: Mapping[str, Any], batch: Mapping[str, Any]) -> None:
        if is_main:
            row = numbers_in(stats)
            append(folder, {"step": step, "reward": row["ppo/mean_scores"], **row})

    trainer.train(
        lambda queries, responses, answer, **_: right(responses, answer),
        generation_kwargs={"max_new_tokens": run.max_new_tokens},
        on_step=on_step,
    )
    rows, model = data[run.eval_split], policy.pretrained_model
    after = look(model, tokenizer, rows, run, when="after", max_tokens=run.max_new_tokens)
    if is_main:
        summary = write(folder, rows, None, after, run)
        trainer.tracker.finish({f"final/{name}": value for name, value in summary.items()})
        close_folder(folder, summary)


def settings(argv: Sequence[str] | None = None, **changes: object) -> tuple[RunConfig, PPOConfig]:
    """The settings of a run: see `from_recipe`."""
    return from_recipe(RECIPE, RunConfig, PPOConfig, argv=argv, **changes)


if __name__ == "__main__":
    main(*settings())
