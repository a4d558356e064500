"""Compares PPO before and after value_learning_rate, lr_warmup_steps and kl_gain: critic.yaml, docs/ppo-critic.md.

`python -m experiments.ziegler_2019_sentiment.critic FOLDER` reads the finished runs of that sweep.
"""

from collections.abc import Mapping, Sequence
from math import log2
from statistics import fmean

from matplotlib import pyplot as plt

from experiments.claims import Claim, Numbers
from experiments.figures import curves, panels
from experiments.margins import margin_fields
from experiments.reports import Report, main, seeds_in_words
from experiments.run_folders import Run, by, of_seeds
from experiments.sentiment_ppo import KL, REWARD
from experiments.ziegler_2019_sentiment.report import PAPER

TITLE = "PPO's value function, warm-up and KL controller"
CLAIM = (
    "A learning rate of its own lets the value function explain variance; a smaller rate with warm-up and a controller "
    "with a proportional part hold the KL, and the same KL buys more reward."
)
EXPLAINED = "ppo/val/var_explained"
EXPLAINING, ERROR = "explained variance", "error of the KL"  # the quantities that claims compare
PANELS = {
    EXPLAINED: "variance of the returns explained",
    KL: "KL to the pretrained model (nats per response)",
    "objective/kl_coef": "coefficient of the KL",
    REWARD: "reward (VADER, -1 to 1)",
}


def read(runs: Sequence[Run]) -> Report:
    """Reads the explained variance and the KL of the last two thirds of the steps, and the reward afterwards."""
    groups = {("before" if rate is None else "after"): group for rate, group in by_rate(runs).items()}
    measured: dict[str, Numbers] = {}
    for name, group in groups.items():
        measured[f"{EXPLAINING}, {name}"] = of_seeds(group, lambda run: fmean(settled(run, EXPLAINED)))
        measured[f"{ERROR}, {name}"] = of_seeds(group, error_of_kl)
        measured[f"reward, {name}"] = of_seeds(group, lambda run: run.per_prompt["reward"])
        measured[f"KL, {name}"] = of_seeds(group, lambda run: run.summary["kl"])
    claims = [
        Claim(text, names, kind, **margin_fields(PAPER, quantity), origin="ours")
        for text, quantity, kind, names in (
            ("the values explain more variance", EXPLAINING, "more", (f"{EXPLAINING}, after", f"{EXPLAINING}, before")),
            ("the KL stays closer to its target", ERROR, "less", (f"{ERROR}, after", f"{ERROR}, before")),
            ("the reward is higher", "reward", "more", ("reward, after", "reward, before")),
            ("the values explain variance at all", EXPLAINING, "more", (f"{EXPLAINING}, after",)),
        )
    ]
    caption = (
        f"Medians of {seeds_in_words(len(by(runs, 'seed')))} over the steps of PPO; bands from the lower to the upper "
        "quartile. Dashed: the target."
    )
    return Report(measured, claims, {"critic": figure(groups)}, {"critic": caption})


def by_rate(runs: Sequence[Run]) -> dict[float | None, list[Run]]:
    """The runs by the learning rate of their value function; those without one first."""
    rates = {run.config["value_learning_rate"] for run in runs}
    return {
        rate: [run for run in runs if run.config["value_learning_rate"] == rate]
        for rate in sorted(rates, key=lambda rate: rate or 0.0)
    }


def settled(run: Run, name: str) -> list[float]:
    """A statistic in the last two thirds of the steps."""
    values = [row[name] for row in run.history]
    return values[len(values) // 3 :]


def error_of_kl(run: Run) -> float:
    """The mean of |log2(KL / target)| over the last third of the steps."""
    values = [row[KL] for row in run.history]
    return fmean(abs(log2(kl / run.config["target"])) for kl in values[-max(1, len(values) // 3) :])


def figure(groups: Mapping[str, Sequence[Run]]) -> plt.Figure:
    """Plots the statistics over the steps, before and after."""
    plot, axes = panels([*PANELS.values()])
    for axis, key in zip(axes, PANELS, strict=True):
        curves(axis, {name: [run.curve("step", key) for run in group] for name, group in groups.items()})
        axis.set_xlabel("PPO step")
    axes[0].set_ylim(-1, 1)
    for group in groups.values():
        axes[1].axhline(group[0].config["target"], color="tab:gray", linestyle="--", linewidth=0.8)
    return plot


if __name__ == "__main__":
    main(TITLE, CLAIM, read)
