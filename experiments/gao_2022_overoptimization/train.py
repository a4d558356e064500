"""PPO without a KL penalty against a proxy of a gold reward (Gao et al. 2022, arXiv:2210.10760). See README.md."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from accelerate import PartialState

from experiments.assets import openings
from experiments.gao_2022_overoptimization.best_of_n import best_of_n, write
from experiments.gao_2022_overoptimization.report import CLAIM, FIRST, GOLD, SECOND, TITLE, read
from experiments.gold import load_gold
from experiments.proxy import Normalised, Sampler, Score, learn_proxy, shuffled
from experiments.reports import report_on_run
from experiments.run_folders import from_recipe
from experiments.sentiment_ppo import KL, StoriesRun, load, train
from trimtab_lm import PPOConfig, PPOTrainer

RECIPE = Path(__file__).with_name("recipe.yaml")
BANK_SEED = 0  # all runs share the bank


@dataclass(frozen=True)
class RunConfig(StoriesRun):
    """The gold score, the proxy that is learnt from it, and the bank of samples for best-of-n."""

    encoder: str = field(
        default="minilm",
        metadata={"help": "Hub id or folder of a sentence encoder, for the gold score; minilm is downloaded."},
    )
    comparisons: int = field(default=512, metadata={"help": "Pairs of samples of the initial policy, for each seed."})
    labels: int = field(default=128, metadata={"help": "How many of them label PPO's proxy."})
    penalty: float = field(default=100.0, metadata={"help": "Weight of |w|^2 / 2 in the proxy's loss."})
    distance: float = field(
        default=8.0, metadata={"help": "Training ends at this root of the KL (nats), or after `steps`."}
    )
    bank_labels: tuple[int, ...] = field(
        default=(8, 16, 32, 64, 128, 256, 512), metadata={"help": "Labels of the proxies for best-of-n."}
    )
    bank_prompts: int = field(default=32, metadata={"help": "Openings of eval_split in the bank."})
    bank_samples: int = field(default=128, metadata={"help": "Samples for each of them: the largest n."})

    def __post_init__(self) -> None:
        if unknown := [labels for labels in (self.labels, *self.bank_labels) if not 1 <= labels <= self.comparisons]:
            raise ValueError(
                f"labels={self.labels}, bank_labels={list(self.bank_labels)}: a proxy learns from 1 to "
                f"comparisons={self.comparisons} labels, got {unknown}. Raise comparisons, or change these."
            )


class WatchedPPOTrainer(PPOTrainer):
    """PPO that logs the gold score of each batch, without learning from it, and ends at a distance."""

    def __init__(self, *args: Any, gold: Score, distance: float, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.gold, self.distance = gold, distance

    def train(self, *args: Any, on_step: Callable[..., None], **options: Any) -> list[dict[str, Any]]:
        """Trains until the root of the batch's KL reaches the distance, or for all steps."""
        history: list[dict[str, Any]] = []

        def until_there(step: int, logs: dict[str, Any], batch: Mapping[str, Any]) -> None:
            on_step(step, logs, batch)
            history.append(logs)
            if logs[KL] >= self.distance**2:
                raise Arrived

        with suppress(Arrived):
            super().train(*args, on_step=until_there, **options)
        return history

    def log_stats(
        self, stats: dict[str, Any], batch: Mapping[str, Sequence[Any]], rewards: Sequence[Any], **options: Any
    ) -> dict[str, Any]:
        """Adds the mean gold score to PPO's statistics, of the batch and of each half, and logs them."""
        golds = self.gold(batch["response"])
        half = len(golds) // 2
        stats |= self.gather_stats({GOLD: fmean(golds), FIRST: fmean(golds[:half]), SECOND: fmean(golds[half:])})
        return super().log_stats(stats, batch, rewards, **options)


class Arrived(Exception):
    """The policy has reached its distance."""


def main(run: RunConfig, ppo: PPOConfig) -> None:
    """Learns the proxies, measures best-of-n, trains against one proxy, and writes the report of this run."""
    state = PartialState()
    policy, tokenizer = load(run.model)
    initial = policy.pretrained_model.eval().requires_grad_(False).to(state.device)
    gold = load_gold(run.encoder, state.device)
    sampler = Sampler(initial, tokenizer, gold, run.max_new_tokens, (run.model, run.encoder))
    folder = Path(ppo.output_dir or Path("runs", ppo.exp_name))
    with state.main_process_first():
        pairs = sampler(shuffled(openings("train"), ppo.seed, run.comparisons), 2, seed=ppo.seed)
        bank = sampler(openings(run.eval_split)[: run.bank_prompts], run.bank_samples, seed=BANK_SEED)
    if state.is_main_process:
        write(folder, best_of_n(bank, pairs, run.bank_labels, penalty=run.penalty))
    trainer = partial(WatchedPPOTrainer, gold=Normalised(gold, pairs.golds.flatten().tolist()), distance=run.distance)
    folder = train(run, ppo, learn_proxy(sampler, pairs, run.labels, penalty=run.penalty), make_trainer=trainer)
    if state.is_main_process:
        report_on_run(TITLE, CLAIM, read, [folder])


def settings(argv: Sequence[str] | None = None, **changes: object) -> tuple[RunConfig, PPOConfig]:
    """The settings of a run: see `from_recipe`."""
    return from_recipe(RECIPE, RunConfig, PPOConfig, argv=argv, **changes)


if __name__ == "__main__":
    main(*settings())
