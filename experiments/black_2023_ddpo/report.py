"""Judges how DDPO's estimators rank: `python -m experiments.black_2023_ddpo.report FOLDER ...`."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median

import numpy as np
from matplotlib import pyplot as plt
from PIL import Image
from torch import Tensor

from experiments.figures import Curve, Verdict, curves, tiled
from experiments.reports import Report, main, spread
from experiments.runs import Run, by

BEFORE, AFTER = "before.png", "after.png"
TITLE = "Rewards for what a diffusion model draws, by DDPO"
CLAIM = (
    "Black et al. 2023, arXiv:2305.13301, figure 4: at an equal number of scored pictures, DDPO with importance "
    "sampling (IS) reaches at least the reward of the score function (SF), and both more than reward-weighted "
    "regression (RWR)."
)
NAMES = {"is": "IS", "sf": "SF", "rwr": "RWR", "rwr_sparse": "RWR-sparse"}
REGRESSIONS = ("RWR", "RWR-sparse")
CONTROL = "no reward"  # regression that weighs all samples of the model equally
POINT = 256  # least number of training samples per point of a curve

Estimators = Mapping[str, Sequence[Run]]


def contact_sheet(images: Tensor) -> Image.Image:
    """Tiles up to sixteen images [B, 3, H, W], four in a row, with a white line between them."""
    return tiled([image.clamp(0, 1) for image in images])


def judge(runs: Sequence[Run]) -> Report:
    """Judges for each reward whether it rose, and how the estimators rank on samples from the same noise."""
    rewards = {reward: estimators(group) for reward, group in by(runs, "reward").items()}
    verdicts: list[Verdict] = []
    for reward, groups in rewards.items():
        check_queries(reward, groups)
        trained = [name for name in groups if name != CONTROL]
        risen = [name for name in trained if name == "IS" or len(trained) == 1]
        verdicts += [rises(reward, name, groups[name]) for name in risen]
        verdicts += ranks(reward, groups)
    figures = {"figure": figure(rewards), "pictures": pictures(rewards), "others": others(rewards)}
    return Report(verdicts, figures)


def estimators(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Groups the runs on one reward by estimator, in the paper's order; each estimator has one run per seed."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(estimator(run), []).append(run)
    for name, group in groups.items():
        seed, count = Counter(run.config["seed"] for run in group).most_common(1)[0]
        if count > 1:
            raise ValueError(
                f"{count} runs of {name} on {group[0].config['reward']} with seed {seed} came in; one for each seed is "
                "needed. Give the folders of one sweep, or of one training."
            )
    order = [*NAMES.values(), CONTROL]
    return dict(sorted(groups.items(), key=lambda item: (order.index(item[0].partition(",")[0]), item[0])))


def estimator(run: Run) -> str:
    """Returns the name of a run's estimator; a regression's name includes its inverse temperature."""
    if run.config["estimator"] != "rwr":
        return NAMES[run.config["estimator"]]
    return f"RWR, beta {run.config['rwr_beta']:g}" if run.config["rwr_beta"] else CONTROL


def check_queries(reward: str, groups: Estimators) -> None:
    """Raises an error if the estimators had unequal numbers of rewards."""
    counts = {f"{queries(run)} by {name}" for name, group in groups.items() for run in group}
    if len({queries(run) for group in groups.values() for run in group}) > 1:
        raise ValueError(
            f"{reward} was asked for unequal numbers of pictures: {', '.join(sorted(counts))}; an equal number is "
            "needed. Give the folders of one sweep, or of one training."
        )


def queries(run: Run) -> int:
    """Returns the number of samples that were scored in training."""
    return int(run.history[-1]["queries"])


# Verdicts --------------------------------------------------------------------------------------------------------


def rises(reward: str, name: str, runs: Sequence[Run]) -> Verdict:
    """Judges whether the reward is higher after training than before, in each seed."""
    before, after = ([run.summary[key] for run in runs] for key in (f"{reward}_before", reward))
    passed = all(last > first for first, last in zip(before, after, strict=True))
    return Verdict(f"{reward}: {name} raises it", f"above {spread(before)}", spread(after), passed)


def ranks(reward: str, groups: Estimators) -> Iterator[Verdict]:
    """Judges IS against SF, and SF (or IS, if there is no SF) against the better regression; paired by seed."""
    if "IS" in groups and "SF" in groups:
        first, second = paired(reward, groups["IS"], groups["SF"])
        if first:
            gaps = [high - low for high, low in zip(first, second, strict=True)]
            obtained = f"IS {spread(first)}, SF {spread(second)}"
            yield Verdict(f"{reward}: IS is at least SF", "median gap of seeds >= 0", obtained, median(gaps) >= 0)
    regressions = [name for name in groups if name.startswith(REGRESSIONS)]
    ours = next((name for name in ("SF", "IS") if name in groups), None)
    if regressions and ours:
        best = max(regressions, key=lambda name: median(run.summary[reward] for run in groups[name]))
        first, second = paired(reward, groups[ours], groups[best])
        if first:
            obtained = f"{ours} {spread(first)}, {best.replace(',', '')} {spread(second)}"
            if CONTROL in groups:
                obtained += f", {CONTROL} {spread(run.summary[reward] for run in groups[CONTROL])}"
            passed = all(high > low for high, low in zip(first, second, strict=True))
            yield Verdict(f"{reward}: {ours} beats RWR", "in every seed", obtained, passed)


def paired(reward: str, runs: Sequence[Run], others: Sequence[Run]) -> tuple[list[float], list[float]]:
    """Returns the rewards after training of the seeds that both groups have."""
    first, second = ({run.config["seed"]: run.summary[reward] for run in group} for group in (runs, others))
    seeds = [seed for seed in first if seed in second]
    return [first[seed] for seed in seeds], [second[seed] for seed in seeds]


# Figures ---------------------------------------------------------------------------------------------------------


def curve(run: Run, key: str, measure: str) -> Curve:
    """Returns a measure over the number of scored samples: before training, means during training, and after it.

    Each mean is over at least POINT samples, and its x is the middle of their range.

    Args:
        run: A finished run.
        key: The measure's name in the history.
        measure: Its name in the summary.
    """
    total, seen = run.curve("queries", key)
    size = -(-POINT * len(total) // int(total[-1]))
    blocks = [slice(start, start + size) for start in range(0, len(total), size)]
    xs = [mean([total[block][0] - total[0], total[block][-1]]) for block in blocks]
    ys = [mean(seen[block]) for block in blocks]
    return [0, *xs, total[-1]], [run.summary[f"{measure}_before"], *ys, run.summary[measure]]


def figure(rewards: Mapping[str, Estimators]) -> plt.Figure:
    """Plots the paper's figure: a panel for each reward, a curve for each estimator."""
    plot, axes = panels(len(rewards))
    for axis, (reward, groups) in zip(axes, rewards.items(), strict=True):
        curves(axis, {name: [curve(run, "reward_mean", reward) for run in group] for name, group in groups.items()})
        axis.set_title(reward, fontsize=10)
        axis.set_ylabel("mean reward")
    return plot


def others(rewards: Mapping[str, Estimators]) -> plt.Figure:
    """Plots, for the first estimator, the measures that were not trained on."""
    plot, axes = panels(len(rewards))
    for axis, (reward, groups) in zip(axes, rewards.items(), strict=True):
        name, group = next(iter(groups.items()))
        logged = [key for key in group[0].history[-1] if key.startswith("other/")]
        known = {key.removeprefix("other/"): key for key in logged}
        curves(axis, {short: [curve(run, key, short) for run in group] for short, key in known.items()})
        axis.set_title(f"not trained on, with {reward} by {name}", fontsize=10)
    return plot


def panels(count: int) -> tuple[plt.Figure, Sequence[plt.Axes]]:
    """Returns a figure with `count` axes side by side."""
    plot, axes = plt.subplots(1, count, figsize=(4.8 * count, 3.8), layout="constrained", squeeze=False)
    for axis in axes.flat:
        axis.set_xlabel("pictures that were scored")
    return plot, list(axes.flat)


def pictures(rewards: Mapping[str, Estimators]) -> plt.Figure:
    """Shows a row for each reward: samples from the same noise before and after, of each estimator's first seed."""
    columns = 1 + max(len(groups) for groups in rewards.values())
    shape = (2.6 * columns, 2.9 * len(rewards))
    plot, axes = plt.subplots(len(rewards), columns, figsize=shape, layout="constrained", squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for row, (reward, groups) in zip(axes, rewards.items(), strict=True):
        firsts = {name: min(group, key=lambda run: run.config["seed"]) for name, group in groups.items()}
        sheets = [("before", next(iter(firsts.values())).folder / BEFORE)]
        sheets += [(name, run.folder / AFTER) for name, run in firsts.items()]
        for axis, (name, sheet) in zip(row, sheets, strict=False):  # another reward may have more estimators
            with Image.open(sheet) as picture:
                axis.imshow(np.asarray(picture), interpolation="nearest")
            axis.set_title(f"{reward}: {name}", fontsize=8)
    return plot


if __name__ == "__main__":
    main(TITLE, CLAIM, judge)
