"""Judges ways to train a diffusion model by reward, quality and distance from the base model, at equal evaluations.

python -m experiments.clark_2023_draft.report FOLDER ...
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from experiments.claims import Claim, Numbers
from experiments.emoji.judging import (
    AFTER,
    BEFORE,
    CONTROL,
    DURING,
    IN_TURN,
    KEPT,
    QUALITY,
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
    reachable,
    with_controls,
)
from experiments.figures import panels
from experiments.margins import margin_fields
from experiments.reports import Report, main, seeds_in_words
from experiments.run_folders import Run, by, of_seeds

PAPER = "clark_2023_draft"
TITLE = "Ways to train a diffusion model on a reward, side by side"
CLAIM = (
    "Clark et al. 2023, arXiv:2309.17400: following the gradient of a differentiable reward (DRaFT) needs far fewer "
    "evaluations of the denoiser than reinforcement learning (DDPO) for as much reward."
)
DISTANCE = "distance"  # of the denoiser's predictions from the base model's: Drift in train.py
DDPO, DRAFT, DRAFT_LV, DPO = "DDPO", "DRaFT-1", "DRaFT-LV", "Diffusion-DPO"
FLOW_GRPO, NFT = "Flow-GRPO", "DiffusionNFT"
NAMES = {"ddpo": DDPO, "flow_grpo": FLOW_GRPO, "nft": NFT, "draft": DRAFT, "diffusion_dpo": DPO}
GROUPS = tuple(caption.split()[1] for caption in IN_TURN)  # captions of one colour are a group

Methods = Mapping[str, Sequence[Run]]


def read(runs: Sequence[Run]) -> Report:
    """Reads, for each method, reward, quality and distance after training, and the gain over its control."""
    if len(budgets := {run.config["evaluations"] for run in runs}) > 1:
        raise ValueError(
            f"the runs may take {sorted(budgets)} evaluations of the denoiser; equal numbers are needed. Give the "
            "folders of one sweep, or of one training."
        )
    rewards = {reward: methods(group) for reward, group in by(runs, "reward").items()}
    groups, controls = rewards.get("warmth", {}), rewards.get(CONTROL, {})
    measured: dict[str, Numbers] = {}
    for name, group in groups.items():
        nothing = in_percent(controls.get(name, []), "warmth", "")
        measured[f"gain by {name}"] = differences(in_percent(group, "warmth", ""), nothing)
        if name in (NFT, DRAFT, DRAFT_LV):  # an epoch of the others ends later
            measured[early(name)] = changes(group, DURING)
    for name, group in {**groups, **{control(name): group for name, group in controls.items()}}.items():
        measured[f"change by {name}"] = changes(group, AFTER)
        measured[f"quality after {name}"] = qualities(group, runs)
        measured[f"distance after {name}"] = of_seeds(group, lambda run: run.per_prompt[DISTANCE])
    measured = {name: numbers for name, numbers in measured.items() if numbers}
    if not groups:
        return Report(measured, [*claims()], {}, {})
    shown = with_controls(groups, controls)
    captions = {
        "pictures": "The same captions from the same noise: before training, and after a training by each method; the "
        "first seed, the first captions.",
        "figure": "Trainings as paths from the base model, before, during and after; means of "
        f"{seeds_in_words(len(by(runs, 'seed')))}. The change of warmth is in per cent of the way to the best of 64 "
        "samples of the base model. (a) Quality is the share of pictures in which the classifier finds name and "
        f"colour of the caption; dashed: {KEPT:.0f}% of the base model's. (b) The squared difference of the "
        "denoiser's predictions from the base model's, on the base model's noised samples.",
    }
    return Report(measured, [*claims()], {"pictures": pictures(groups), "figure": figure(shown)}, captions)


def methods(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Groups runs by method, in the order of NAMES."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        name = DRAFT_LV if run.config.get("low_variance_samples") else NAMES[run.config["method"]]
        groups.setdefault(name, []).append(run)
    return {name: groups[name] for name in (DDPO, FLOW_GRPO, NFT, DRAFT, DRAFT_LV, DPO) if name in groups}


def changes(runs: Sequence[Run], sheet: str) -> dict[int, list[float]]:
    """The change of warmth since before training by seed: for each caption, in per cent of the reachable range."""
    return differences(*(in_percent(runs, "warmth", at(one, "")) for one in (sheet, BEFORE)))


def early(name: str) -> str:
    """What the change is called when a quarter of the evaluations is spent."""
    return f"change by {name} with a quarter of the evaluations"


def claims() -> Iterator[Claim]:
    """The paper's claims about DRaFT and DDPO, and ours."""
    moved = fields(PAPER, "reward")
    place, drafts = {"place": "abstract"}, (DRAFT, DRAFT_LV)
    yield from learns(PAPER, (DDPO, NFT, *drafts, DPO))
    for name in drafts:
        yield Claim(f"{name} gains more than DDPO", (f"gain by {name}", f"gain by {DDPO}"), **place, **moved)
        text = f"{name} with a quarter of the evaluations changes warmth more than DDPO with all"
        yield Claim(text, (early(name), f"change by {DDPO}"), **place, **moved)
    for name, other in ((NFT, DDPO), (DPO, DDPO), (DRAFT, DPO)):
        compared = f"gain by {name}", f"gain by {other}"
        yield Claim(f"{name} gains more than {other}", compared, origin="ours", **moved)
    yield from keeps_quality(PAPER, (DDPO, NFT, *drafts, DPO))
    yield from goes_further(PAPER, (NFT, *drafts, DPO), DDPO)


def learns(paper: str, names: Sequence[str]) -> Iterator[Claim]:
    """The check of each method: that it raises warmth."""
    for name in names:
        yield Claim(
            f"{name} raises warmth above its control without a reward",
            (f"gain by {name}",),
            origin="ours",
            trivial="the reward is optimised",
            **fields(paper, "reward"),
        )


def keeps_quality(paper: str, names: Sequence[str]) -> Iterator[Claim]:
    """A claim of ours about each method: that its pictures are still what their captions say."""
    for name in names:
        text = f"{name} keeps more than {KEPT:.0f}% of the base model's quality"
        yield Claim(text, (f"quality after {name}",), origin="ours", than=KEPT, **fields(paper, "quality"))


def goes_further(paper: str, names: Sequence[str], other: str) -> Iterator[Claim]:
    """A claim of ours about each method: that it ends further from the base model than another one."""
    for name in names:
        compared = f"distance after {name}", f"distance after {other}"
        text = f"{name} goes further from the base model than {other}"
        yield Claim(text, compared, origin="ours", **fields(paper, "distance"))


def fields(paper: str, measure: str) -> dict[str, Any]:
    """What a paper's claims about a measure share."""
    return {"kind": "more", "scale": SCALE, "groups": GROUPS} | margin_fields(paper, measure)


# Figures ---------------------------------------------------------------------------------------------------------


def figure(groups: Methods) -> plt.Figure:
    """Plots warmth against quality, and against the distance from the base model."""
    plot, axes = panels(("against quality", "against the distance from the base model"), height=4, sharey=True)
    colours: dict[str, Any] = {}
    for name, group in groups.items():
        method, _, is_control = name.partition(", ")
        gains = 100 * (means(group, "warmth") - means(group, "warmth")[0]) / reachable(group[0], "warmth")
        quality = 100 * means(group, QUALITY) / means(group, QUALITY)[0]
        for axis, xs in zip(axes, (quality, means(group, DISTANCE)), strict=True):
            style = {"linestyle": ":" if is_control else "-", "color": colours.get(method)}
            colours[method] = path(axis, xs, gains, "_" if is_control else name, **style)  # _: not in the legend
    axes[0].axvline(KEPT, color="grey", linestyle="--", linewidth=1)
    label(axes[0], "quality (% of the base model's)")
    label(axes[1], "distance (% of the prediction's mean square)")
    axes[0].set_ylabel("change of warmth (% of the reachable range)")
    axes[1].plot([], [], ":", color="grey", label="no reward")
    axes[1].legend(frameon=False, fontsize=9)
    return plot


def label(axis: Axes, text: str) -> None:
    """Names the x axis, and draws a grid."""
    axis.set_xlabel(text)
    axis.grid(alpha=0.3)


def means(group: Sequence[Run], measure: str) -> np.ndarray:
    """The mean of the runs before, during and after training, without those that a run lacks."""
    names = [at(sheet, measure) for sheet in SHEETS]
    return np.array([mean(run.summary[name] for run in group) for name in names if name in group[0].summary])


def pictures(groups: Methods) -> plt.Figure:
    """Shows pictures of the same captions in rows: before training, and after that of each method."""
    first = first_seed(next(iter(groups.values())))
    rows: list[tuple[str, Path]] = [("before training", first.folder / BEFORE)]
    rows += [(f"after {name}", first_seed(group).folder / AFTER) for name, group in groups.items()]
    return picture_rows(rows, IN_TURN)


if __name__ == "__main__":
    main(TITLE, CLAIM, read)
