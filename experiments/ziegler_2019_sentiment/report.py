"""Judges the reward and the KL of PPO: `python -m experiments.ziegler_2019_sentiment.report FOLDER ...`."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from matplotlib import pyplot as plt

from experiments.figures import Verdict, curves
from experiments.reports import Report, main, spread
from experiments.runs import Run, by
from experiments.sentiment_ppo import KL, REWARD, samples_of

TITLE = "PPO with an adaptive KL coefficient on the sentiment of continuations"
CLAIM = (
    "Ziegler et al. 2019, arXiv:1909.08593: the reward rises, the controller holds the KL to the pretrained model at "
    "its target, and more KL buys more reward."
)
PANELS = {
    REWARD: "reward (VADER, -1 to 1)",
    KL: "KL to the pretrained model (nats per response)",
    "objective/kl_coef": "coefficient of the KL",
}


def judge(runs: Sequence[Run]) -> Report:
    """Judges for each target the reward of held-out openings and the KL of the last third of the steps."""
    targets = by([run for run in runs if run.config["adap_kl_ctrl"]], "target")
    fixed = by([run for run in runs if not run.config["adap_kl_ctrl"]], "init_kl_coef")
    groups = {f"coefficient {value:g}": group for value, group in fixed.items()}
    groups |= {f"target {value:g}": group for value, group in targets.items()}
    for name, group in groups.items():
        check_seeds(name, group)
    verdicts = [rises(group, name) for name, group in groups.items()]
    verdicts += [holds(target, group) for target, group in targets.items()]
    verdicts += more_buys_more(targets)
    samples = samples_of({f"after, {name}": group[0] for name, group in groups.items()})
    return Report(verdicts, {"figure": figure(groups, list(targets))}, samples)


def check_seeds(name: str, runs: Sequence[Run]) -> None:
    """Raises a ValueError if two runs have one seed, because they then differ in more than target and seed."""
    seeds = [run.config["seed"] for run in runs]
    if len(set(seeds)) < len(seeds):
        raise ValueError(
            f"{name} has runs of the seeds {seeds}, in {', '.join(str(run.folder) for run in runs)}; each seed is "
            "needed once. Give the folder of one run, or of one sweep over target and seed."
        )


def rises(runs: Sequence[Run], name: str) -> Verdict:
    """Judges whether the reward of held-out openings is higher after training, in each seed."""
    before, after = ([run.summary[key] for run in runs] for key in ("reward_before", "reward"))
    passed = all(last > first for first, last in zip(before, after, strict=True))
    return Verdict(f"{name}: the reward rises", f"above {spread(before)}", spread(after), passed)


def holds(target: float, runs: Sequence[Run]) -> Verdict:
    """Judges whether the KL is within a factor of two of its target, in each seed."""
    kls = [run.summary["kl_held"] for run in runs]
    expected = f"{target / 2:g} to {target * 2:g} nats"
    passed = all(target / 2 <= kl <= target * 2 for kl in kls)
    return Verdict(f"target {target:g}: the KL is held", expected, f"{spread(kls, '.2f')} nats", passed)


def more_buys_more(targets: Mapping[float, Sequence[Run]]) -> Iterator[Verdict]:
    """Judges whether the larger of two neighbouring targets gives more reward, paired by seed."""
    for (low, few), (high, many) in pairwise(targets.items()):
        lower = {run.config["seed"]: run.summary["reward"] for run in few}
        higher = {run.config["seed"]: run.summary["reward"] for run in many}
        gains = [higher[seed] - lower[seed] for seed in lower if seed in higher]
        if gains:
            claim = f"target {high:g} gives more reward than {low:g}"
            yield Verdict(claim, "a gain above 0", f"{spread(gains, '+.3f')}", min(gains) > 0)


def figure(groups: Mapping[str, Sequence[Run]], targets: Sequence[float]) -> plt.Figure:
    """Plots reward, KL and its coefficient over the steps, with the targets as dashed lines."""
    plot, axes = plt.subplots(1, len(PANELS), figsize=(4.6 * len(PANELS), 3.6), layout="constrained")
    for axis, (key, title) in zip(axes, PANELS.items(), strict=True):
        curves(axis, {name: [run.curve("step", key) for run in group] for name, group in groups.items()})
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("PPO step")
    for target in targets:
        axes[1].axhline(target, color="tab:gray", linestyle="--", linewidth=0.8)
    return plot


if __name__ == "__main__":
    main(TITLE, CLAIM, judge)
