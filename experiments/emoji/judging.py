"""What experiments on the emoji pipeline share: measures before and after a training, in per cent, and its pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from PIL import Image
from torch import Tensor

from experiments.emoji import drawings
from experiments.figures import tiled
from experiments.run_folders import Run, of_seeds

SHEETS = BEFORE, DURING, AFTER = "before.png", "during.png", "after.png"
QUALITY = "recognised"  # 1 where the classifier finds the caption's name and colour in the picture, else 0
REACHABLE = {"agreement": 0.709, "jpeg_compressibility": 0.0431, "jpeg_incompressibility": 0.0391, "warmth": 0.0954}
"""The best of 64 samples of the base model minus their mean, averaged over captions: reachable.py measures it."""
RANGES: dict[str, Mapping[str, float]] = {"unet": REACHABLE, "flow": {"warmth": 0.148}}
"""REACHABLE of each base model."""
CONTROL = "random"  # the reward of runs whose reward says nothing about the image
SCALE = "pictures of 24 by 24 pixels"
KEPT = 90.0  # per cent of the base model's quality
SHOWN, COLUMNS = 16, 7  # pictures of a sheet, and those of them in the figure
IN_TURN = tuple(
    f"a {[*drawings.COLOURS][(name + turn) % len(drawings.COLOURS)]} {drawings.NAMES[name]}"
    for turn in (1, 2, 3, 4, 5, 0)  # turn 0 is held out
    for name in range(len(drawings.NAMES))
)
"""The captions of emoji, of which each 24 have each name once."""


def at(sheet: str, measure: str) -> str:
    """The name in summary.json and per_prompt.json of a measure of the pictures of a sheet."""
    return measure if sheet == AFTER else f"{measure}_{sheet.removesuffix('.png')}"


def largest_kept(means: Mapping[str, float], reward: str) -> float:
    """The largest mean reward before, during or after a training whose pictures kept KEPT per cent of the quality.

    A search by this number does not choose the settings that go furthest, which destroy the model.
    """
    least = KEPT / 100 * means[at(BEFORE, QUALITY)]
    return max(means[at(sheet, reward)] for sheet in SHEETS if means.get(at(sheet, QUALITY), -1.0) >= least)


def contact_sheet(images: Tensor) -> Image.Image:
    """Tiles up to sixteen images [B, 3, H, W], four in a row, with a white line between them."""
    return tiled([image.clamp(0, 1) for image in images])


def in_percent(runs: Sequence[Run], reward: str, end: str) -> dict[int, list[float]]:
    """A reward after training by seed: for each caption, in per cent of the reachable range."""
    known = [run for run in runs if reward + end in run.per_prompt]
    return of_seeds(known, lambda run: [100 * value / reachable(run, reward) for value in run.per_prompt[reward + end]])


def reachable(run: Run, reward: str) -> float:
    """The reachable range of the run's base model; 1 for a reward that has none."""
    return RANGES[run.config.get("base", "unet")].get(reward, 1.0)


def qualities(runs: Sequence[Run], all_runs: Sequence[Run], end: str = "") -> dict[int, list[float]]:
    """The quality after training by seed: for each caption, in per cent of the base model's mean.

    The change of a picture is added to the mean of all runs before training: pictures from the same noise are compared.
    """
    name = QUALITY + end
    known = [run for run in all_runs if at(BEFORE, name) in run.per_prompt]
    if not known:
        return {}
    whole = mean(mean(run.per_prompt[at(BEFORE, name)]) for run in known)

    def of_captions(run: Run) -> list[float]:
        pairs = zip(run.per_prompt[name], run.per_prompt[at(BEFORE, name)], strict=True)
        return [100 * (1 + (now - then) / whole) for now, then in pairs]

    return of_seeds([run for run in runs if at(BEFORE, name) in run.per_prompt], of_captions)


def differences(numbers: Mapping[int, list[float]], others: Mapping[int, list[float]]) -> dict[int, list[float]]:
    """Number - other for each seed that both have, and each caption."""
    return {
        seed: [one - other for one, other in zip(numbers[seed], others[seed], strict=True)]
        for seed in sorted(numbers.keys() & others.keys())
    }


def with_controls(
    groups: Mapping[str, Sequence[Run]], controls: Mapping[str, Sequence[Run]]
) -> dict[str, Sequence[Run]]:
    """The runs of each method, and after them those of each method's control under their own name."""
    return {**groups, **{control(name): controls[name] for name in groups if name in controls}}


def control(name: str) -> str:
    """What the runs of a method without a reward are called."""
    return f"{name}, no reward"


def path(axis: Axes, xs: np.ndarray, ys: np.ndarray, name: str, **style: Any) -> str:
    """Draws the course of a training, with a large point at its end; returns its colour."""
    (line,) = axis.plot(xs, ys, label=name, marker="o", markersize=3, **style)
    axis.plot(xs[-1:], ys[-1:], marker="o", markersize=8, color=line.get_color())
    return line.get_color()


def picture_rows(rows: Sequence[tuple[str, Path]], captions: Sequence[str] = ()) -> plt.Figure:
    """Shows the first pictures of contact sheets in a row each, with a label, below their captions."""
    width, height = COLUMNS + 1.5, 1.02 * len(rows) + 0.3
    plot, axes = plt.subplots(len(rows), COLUMNS, figsize=(width, height), squeeze=False)
    plot.subplots_adjust(left=1.5 / width, right=0.995, bottom=0.02, top=1 - 0.3 / height, wspace=0.04, hspace=0.06)
    for row, (label, file) in zip(axes, rows, strict=True):
        row[0].text(-0.06, 0.5, label, transform=row[0].transAxes, ha="right", va="center", fontsize=10)
        for axis, tile in zip(row, tiles(file), strict=False):
            axis.imshow(tile, interpolation="nearest")
    for axis in axes.flat:
        axis.axis("off")
    for axis, caption in zip(axes[0], captions, strict=False):
        axis.set_title(caption.removeprefix("a "), fontsize=9, pad=3)
    return plot


def first_seed(runs: Sequence[Run]) -> Run:
    """The run with the smallest seed."""
    return min(runs, key=lambda run: run.config["seed"])


def tiles(sheet: Path) -> list[np.ndarray]:
    """Cuts the first pictures out of a contact sheet, which has four in a row, [H, W, 3] each."""
    with Image.open(sheet) as picture:
        pixels = np.asarray(picture)
    side = (pixels.shape[1] + 1) // 4
    count = min(COLUMNS, 4 * ((pixels.shape[0] + 1) // side))
    places = [divmod(i, 4) for i in range(count)]
    return [pixels[y * side : (y + 1) * side - 1, x * side : (x + 1) * side - 1] for y, x in places]
