"""One trial of a search: PPO on several seeds, whose mean reward within a budget of KL is the metric. See README.md."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from accelerate import PartialState

from experiments.run_folders import SAMPLES, SUMMARY, append, close_folder, from_recipe, open_folder
from experiments.sentiment import sentiment
from experiments.sentiment_ppo import StoriesRun, train
from trimtab_common.config import to_flat_dict
from trimtab_common.tracking import start_tracking
from trimtab_lm import PPOConfig

RECIPE = Path(__file__).with_name("recipe.yaml")


@dataclass(frozen=True)
class SearchConfig(StoriesRun):
    """How many trainings a trial averages."""

    seeds: int = field(default=4, metadata={"help": "Trainings of a trial, on the seed and those that follow it."})

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ValueError(f"seeds={self.seeds}: a trial needs 1 training or more.")


def main(run: SearchConfig, ppo: PPOConfig) -> None:
    """Trains on each seed, and logs after each the mean results of the seeds so far: a search may end the trial there.

    The trainings have no tracker and leave nothing but their results.
    """
    if PartialState().num_processes > 1:
        raise SystemExit("A trial runs in one process. Start it with python, not with torchrun or accelerate.")
    folder, config = Path(ppo.output_dir or Path("runs", ppo.exp_name)), to_flat_dict(run, ppo)
    open_folder(folder, config, goes_on=False)
    tracking = start_tracking(
        ppo.log_with,
        project=ppo.tracker_project_name,
        config=config,
        name=ppo.exp_name,
        folder=ppo.project_kwargs.get("logging_dir", "."),
        init_kwargs=ppo.tracker_kwargs,
    )
    results, means = list[dict[str, float]](), dict[str, float]()
    with tracking as tracker, TemporaryDirectory() as place:
        for step, seed in enumerate(range(ppo.seed, ppo.seed + run.seeds), start=1):
            print(f"seed {seed}, {step} of {run.seeds}", flush=True)
            training = replace(ppo, seed=seed, log_with=None, output_dir=str(Path(place, str(seed))))
            trained = train(run, training, sentiment)
            results.append(json.loads((trained / SUMMARY).read_text(encoding="utf-8")))
            means = {f"search/{name}": fmean(result[name] for result in results) for name in results[0]}
            append(folder, {"step": step, **means})
            tracker.log(means, step)
            samples = json.loads((trained / SAMPLES).read_text(encoding="utf-8"))
            tracker.table("samples", list(samples), zip(*samples.values(), strict=True), step)
        tracker.finish(means)
    close_folder(folder, means)


def settings(argv: Sequence[str] | None = None, **changes: object) -> tuple[SearchConfig, PPOConfig]:
    """The settings of a trial: see `from_recipe`."""
    return from_recipe(RECIPE, SearchConfig, PPOConfig, argv=argv, **changes)


if __name__ == "__main__":
    main(*settings())
