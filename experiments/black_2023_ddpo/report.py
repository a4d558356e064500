"""Judges what DDPO's estimators gain over no reward, and at what quality.

python -m experiments.black_2023_ddpo.report FOLDER ...
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from experiments.black_2023_ddpo.bases import BASES
from experiments.claims import Claim, Numbers
from experiments.emoji.judging import (
    AFTER,
    BEFORE,
    CONTROL,
    DURING,
    KEPT,
    QUALITY,
    REACHABLE,
    SCALE,
    SHEETS,
    at,
    control,
    differences,
    first_seed,
    in_percent,
    path,
    picture_rows,
    qualities,
    with_controls,
)
from experiments.figures import Curve, curves
from experiments.margins import margin_fields
from experiments.reports import Report, main, medians_in_words
from experiments.run_folders import Run, by

PAPER = "black_2023_ddpo"
TITLE = "Rewards for what a diffusion model draws, by DDPO"
CLAIM = (
    "Black et al. 2023, arXiv:2305.13301: policy gradients (IS: importance sampling, SF: score function) optimize a "
    "reward of the image, better than reward-weighted regression (RWR) does, and on prompts that they were not trained "
    "on too."
)
NAMES = {"is": "IS", "sf": "SF", "rwr": "RWR", "rwr_sparse": "RWR-sparse"}
WITH_KL = ", KL"  # after the name of an estimator with a KL penalty to the base model
LABELS = {
    "warmth": "warm colours",
    "jpeg_incompressibility": "large files",
    "jpeg_compressibility": "small files",
    "agreement": "classifier",
}
"""What the rewards are called beside the pictures, in the order of their rows."""
SHARE = 100 / 3  # per cent of the reachable range
HELD_OUT = "_held_out"  # in per_prompt.json, after the measure's name: the captions that were not trained on
BASE = BASES["emoji"]
HALVES = {
    "": tuple(caption for caption in BASE.captions if caption in BASE.trained),
    HELD_OUT: tuple(caption for caption in BASE.captions if caption not in BASE.trained),
}

Methods = Mapping[str, Sequence[Run]]


def read(runs: Sequence[Run]) -> Report:
    """Reads, for each reward, its mean over images of each caption after training, with the reward and without it.

    The gain of a method is the difference from its control, for the same seed and caption.
    """
    check_equal(runs)
    rewards = {reward: methods(group) for reward, group in by(runs, "reward").items()}
    controls = rewards.pop(CONTROL, {})
    measured: dict[str, Numbers] = {}
    for reward, groups in rewards.items():
        for end in ("", HELD_OUT):
            for name, group in groups.items():
                numbers = in_percent(group, reward, end)
                nothing = in_percent(controls.get(name, []), reward, end)
                gains = differences(numbers, nothing)
                rows = {named(reward, name, end): numbers, named(reward, control(name), end): nothing}
                rows |= {gain(reward, name, end): gains, quality(reward, name, end): qualities(group, runs, end)}
                measured |= {key: row for key, row in rows.items() if row}
    for name, group in controls.items():
        measured |= {quality(CONTROL, name): row for row in [qualities(group, runs)] if row}
    panels = {reward: with_controls(groups, controls) for reward, groups in rewards.items()}
    known = [reward for reward in rewards if reward in REACHABLE]
    claims = [claim for reward in known for claim in (*claims_about(reward), *comparisons(reward))]
    if not panels:
        return Report(measured, claims, {}, {})
    count = len(by(runs, "seed"))
    first, second = ("Left", "Right") if len(panels) == 1 else ("Above", "Below")
    captions = {
        "pictures": "The same captions from the same noise: before training, after a training on random numbers, and "
        "halfway and after the training on each reward; the first seed, the first captions.",
        "figure": f"{first}: the mean reward of all captions over the number of scored samples: "
        f"{medians_in_words(count)}. The dashed line is the best of 64 samples of the base model. {second}: the same "
        "trainings as paths from the base model, mean of the seeds; quality is the share of pictures in which the "
        f"classifier finds name and colour of the caption. Dashed: {KEPT:.0f}% of the base model's quality, and a "
        "third of the reachable range.",
    }
    return Report(measured, claims, {"pictures": pictures(panels), "figure": figure(panels)}, captions)


def methods(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Groups the runs on one reward by estimator, in the paper's order, without and with a KL penalty."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        kind = WITH_KL if run.config.get("init_kl_coef") else ""
        groups.setdefault(NAMES[run.config["estimator"]] + kind, []).append(run)
    return {name: groups[name] for known in NAMES.values() for name in (known, known + WITH_KL) if name in groups}


def check_equal(runs: Sequence[Run]) -> None:
    """Raises an error if the runs scored unequal numbers of samples."""
    counts = {f"{int(run.history[-1]['queries'])} by {NAMES[run.config['estimator']]}" for run in runs}
    if len({run.history[-1]["queries"] for run in runs}) > 1:
        raise ValueError(
            f"the runs have unequal numbers of scored samples: {', '.join(sorted(counts))}; equal numbers are needed. "
            "Give the folders of one sweep, or of one training."
        )


# Numbers and claims ----------------------------------------------------------------------------------------------


def named(reward: str, name: str, end: str = "") -> str:
    """The name of a reward after training."""
    return f"{reward} by {name}" + (", other captions" if end else "")


def gain(reward: str, name: str, end: str = "") -> str:
    """The name of a method's gain over its control."""
    return f"gain in {named(reward, name, end)}"


def quality(reward: str, name: str, end: str = "") -> str:
    """The name of the quality after a training on a reward."""
    return f"quality after {named(reward, name, end)}"


def claims_about(reward: str) -> Iterator[Claim]:
    """The paper's claims about IS on a reward, and ours; captions of one colour are a group."""
    groups = {end: tuple(caption.split()[1] for caption in asked) for end, asked in HALVES.items()}
    shared: dict[str, Any] = {"kind": "more", "scale": SCALE, "groups": groups[""]}
    moved, kept = (shared | margin_fields(PAPER, measure) for measure in ("reward", "quality"))
    yield Claim(
        f"{reward}: IS raises it above the control without a reward",
        (gain(reward, "IS"),),
        place="section 6.1, figure 4",
        trivial="the reward is optimised",
        **moved,
    )
    yield Claim(
        f"{reward}: IS raises it for captions that it was not trained on",
        (gain(reward, "IS", HELD_OUT),),
        place="section 6.3",
        **moved | {"groups": groups[HELD_OUT]},
    )
    yield Claim(
        f"{reward}: IS gains more than a third of the reachable range",
        (gain(reward, "IS"),),
        origin="ours",
        than=SHARE,
        **moved,
    )
    yield Claim(
        f"{reward}: IS keeps more than {KEPT:.0f}% of the base model's quality",
        (quality(reward, "IS"),),
        origin="ours",
        than=KEPT,
        **kept,
    )


def comparisons(reward: str, paper: str = PAPER) -> Iterator[Claim]:
    """The paper's claims about two estimators, and ours about the KL penalty, by the margins of a paper's folder."""
    groups = tuple(caption.split()[1] for caption in HALVES[""])
    shared: dict[str, Any] = {"kind": "more", "scale": SCALE, "groups": groups}
    moved, kept = (shared | margin_fields(paper, measure) for measure in ("reward", "quality"))
    for first, second in (("IS", "RWR"), ("IS", "RWR-sparse"), ("SF", "RWR"), ("IS", "SF")):
        yield Claim(
            f"{reward}: {first} gains more than {second} from as many samples",
            (gain(reward, first), gain(reward, second)),
            place="section 6.1, figure 4",
            **moved,
        )
    yield Claim(
        f"{reward}: IS with a KL penalty keeps more quality than without",
        (quality(reward, "IS" + WITH_KL), quality(reward, "IS")),
        origin="ours",
        **kept,
    )


# Figures ---------------------------------------------------------------------------------------------------------


def curve(run: Run, measure: str) -> Curve:
    """Returns a measure over the number of scored samples: before, halfway and after training, of the same captions."""
    total, _ = run.curve("queries", "step")
    return [0, total[len(total) // 2 - 1], total[-1]], [run.summary[at(sheet, measure)] for sheet in SHEETS]


def figure(rewards: Mapping[str, Methods]) -> plt.Figure:
    """Plots for each reward the paper's figure 4 and, if quality is known, the reward against it.

    Several rewards are in columns, two side by side. The panels of a single one are side by side.
    """
    runs = [run for groups in rewards.values() for group in groups.values() for run in group]
    rows = 2 if all(QUALITY in run.summary for run in runs) else 1
    across, down = min(2, len(rewards)), rows * ((len(rewards) + 1) // 2)
    if is_single := len(rewards) == 1:
        across, down = down, across
    plot, axes = plt.subplots(down, across, figsize=(4.2 * across, 3.6 * down), layout="constrained", squeeze=False)
    axes = axes.T if is_single else axes
    for number, (reward, groups) in enumerate(rewards.items()):
        column = axes[rows * (number // 2) :, number % 2]
        curves(column[0], {name: [curve(run, reward) for run in group] for name, group in groups.items()})
        column[0].set_title(reward, fontsize=10)
        column[0].set_xlabel("scored samples")
        column[0].set_ylabel("mean reward" + (" (kB)" if reward.startswith("jpeg") else ""))
        if reward in REACHABLE:
            start = mean(run.summary[at(BEFORE, reward)] for group in groups.values() for run in group)
            column[0].axhline(start + REACHABLE[reward], color="grey", linestyle="--", linewidth=1)
        if rows == 2:
            against_quality(column[1], reward, groups)
    for axis in axes[-rows:, 1:].flat if len(rewards) % 2 else ():
        axis.axis("off")
    if is_single:  # one legend below the panels
        plot.legend(*axes[-1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
        for axis in axes.flat:
            axis.get_legend().remove()
    return plot


def against_quality(axis: Axes, reward: str, groups: Methods) -> None:
    """Plots a path for each method: from the base model, in per cent of its quality and of the reachable range."""
    for name, group in groups.items():
        ends = {measure: np.array([curve(run, measure)[1] for run in group]).mean(0) for measure in (reward, QUALITY)}
        shares = 100 * ends[QUALITY] / ends[QUALITY][0]
        gains = 100 * (ends[reward] - ends[reward][0]) / REACHABLE.get(reward, 1.0)
        path(axis, shares, gains, name)
    axis.axvline(KEPT, color="grey", linestyle="--", linewidth=1)
    axis.axhline(SHARE, color="grey", linestyle="--", linewidth=1)
    axis.set_xlabel("quality (% of the base model's)")
    axis.set_ylabel("change (% of the reachable range)")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=9)


def pictures(rewards: Mapping[str, Methods]) -> plt.Figure:
    """Shows pictures of the same captions in rows: before training, after the control, halfway and after each reward.

    The rows are of the first method of each reward and of its first seed.
    """
    known = [reward for reward in LABELS if reward in rewards]
    rows: list[tuple[str, Path]] = []
    for reward in [*known, *(reward for reward in rewards if reward not in known)]:
        name, group = next(iter(rewards[reward].items()))
        run, nothing = first_seed(group), rewards[reward].get(control(name))
        if not rows:
            rows.append(("before training", run.folder / BEFORE))
            rows += [("after training\nwithout a reward", first_seed(nothing).folder / AFTER)] if nothing else []
        label = LABELS.get(reward, reward)
        rows += [(f"{label},\nhalfway", run.folder / DURING), (f"{label},\nafter training", run.folder / AFTER)]
    return picture_rows(rows, BASE.captions if run.config["model"] == "emoji" else ())


if __name__ == "__main__":
    main(TITLE, CLAIM, read)
