"""PPO without a KL penalty against a proxy of a gold reward (Gao et al. 2022, arXiv:2210.10760). See README.md."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from accelerate import PartialState

from experiments.assets import openings
from experiments.gao_2022_overoptimization.gold import load_gold
from experiments.gao_2022_overoptimization.proxy import Score, gold_and_proxy
from experiments.gao_2022_overoptimization.report import CLAIM, GOLD, TITLE, judge
from experiments.reports import report_on
from experiments.runs import from_recipe
from experiments.sentiment_ppo import StoriesRun, load, train
from trimtab_lm import PPOConfig, PPOTrainer

RECIPE = Path(__file__).with_name("recipe.yaml")


@dataclass(frozen=True)
class RunConfig(StoriesRun):
    """The gold score, and the proxy that is learnt from it."""

    encoder: str = field(
        default="minilm",
        metadata={"help": "Hub id or folder of a sentence encoder, for the gold score; minilm is downloaded."},
    )
    labels: int = field(default=128, metadata={"help": "Comparisons by gold that the proxy is learnt from."})
    penalty: float = field(default=100.0, metadata={"help": "Weight of |w|^2 / 2 in the proxy's loss."})
    baseline: int = field(
        default=128, metadata={"help": "Samples of the initial policy over which both scores get mean 0, variance 1."}
    )


class WatchedPPOTrainer(PPOTrainer):
    """PPO that logs the mean gold score of each batch, without learning from it."""

    def __init__(self, *args: Any, gold: Score, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.gold = gold

    def log_stats(
        self, stats: dict[str, Any], batch: Mapping[str, Sequence[Any]], rewards: Sequence[Any], **options: Any
    ) -> dict[str, Any]:
        """Adds the mean gold score to PPO's statistics and logs them."""
        stats |= self.gather_stats({GOLD: fmean(self.gold(batch["response"]))})
        return super().log_stats(stats, batch, rewards, **options)


def main(run: RunConfig, ppo: PPOConfig) -> None:
    """Learns the proxy, trains against it, and writes the report of this run into its folder."""
    state = PartialState()
    policy, tokenizer = load(run.model)
    initial = policy.pretrained_model.eval().requires_grad_(False).to(state.device)
    gold, proxy = gold_and_proxy(
        initial,
        tokenizer,
        load_gold(run.encoder, state.device),
        openings()[run.eval_prompts :],
        labels=run.labels,
        baseline=run.baseline,
        penalty=run.penalty,
        max_new_tokens=run.max_new_tokens,
        seed=ppo.seed,
    )
    folder = train(run, ppo, proxy, make_trainer=partial(WatchedPPOTrainer, gold=gold))
    if state.is_main_process:
        report_on(TITLE, CLAIM, judge, [folder])


def settings(argv: Sequence[str] | None = None, **changes: object) -> tuple[RunConfig, PPOConfig]:
    """The settings of a run: see `from_recipe`."""
    return from_recipe(RECIPE, RunConfig, PPOConfig, argv=argv, **changes)


if __name__ == "__main__":
    main(*settings())
