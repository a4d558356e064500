"""Judges what DDPO's estimators gain over no reward: `python -m experiments.black_2023_ddpo.report FOLDER ...`."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean

import numpy as np
from matplotlib import pyplot as plt
from PIL import Image
from torch import Tensor

from experiments.black_2023_ddpo.shapes import CAPTIONS, TRAINED
from experiments.claims import Claim, Numbers
from experiments.figures import Curve, curves, tiled
from experiments.margins import margin_fields
from experiments.reports import Report, main, medians_in_words
from experiments.run_folders import Run, by, of_seeds

BEFORE, DURING, AFTER = "before.png", "during.png", "after.png"
PAPER = "black_2023_ddpo"
TITLE = "Rewards for what a diffusion model draws, by DDPO"
CLAIM = (
    "Black et al. 2023, arXiv:2305.13301: policy gradients (IS: importance sampling, SF: score function) optimize a "
    "reward of the image, better than reward-weighted regression (RWR) does, and on prompts that they were not trained "
    "on too."
)
NAMES = {"is": "IS", "sf": "SF", "rwr": "RWR", "rwr_sparse": "RWR-sparse"}
CONTROL = "random"  # the reward of runs whose reward says nothing about the image
REACHABLE = {"rgb_alignment": 0.602, "jpeg_incompressibility": 0.297, "jpeg_compressibility": 0.297}
"""What a reward can change by: from a grey image to the prompted colour; from a file of grey to one of noise, in kB."""
SCALE = "pictures of 16 by 16 pixels"
HELD_OUT = "_held_out"  # in per_prompt.json, after the measure's name: the captions that were not trained on
HALVES = {"": TRAINED, HELD_OUT: tuple(caption for caption in CAPTIONS if caption not in TRAINED)}
POINT = 256  # least number of training samples per point of a curve
SHOWN = 16  # pictures of a sheet

Estimators = Mapping[str, Sequence[Run]]


def at(sheet: str, measure: str) -> str:
    """The name in summary.json and per_prompt.json of a measure of the pictures of a sheet."""
    return measure if sheet == AFTER else f"{measure}_{sheet.removesuffix('.png')}"


def contact_sheet(images: Tensor) -> Image.Image:
    """Tiles up to sixteen images [B, 3, H, W], four in a row, with a white line between them."""
    return tiled([image.clamp(0, 1) for image in images])


def read(runs: Sequence[Run]) -> Report:
    """Reads, for each reward, its mean over images of each caption after training, with the reward and without it.

    The gain of an estimator is the difference from its control, for the same seed and caption.
    """
    check_equal(runs)
    rewards = {reward: estimators(group) for reward, group in by(runs, "reward").items()}
    controls = rewards.pop(CONTROL, {})
    measured: dict[str, Numbers] = {}
    for reward, groups in rewards.items():
        for end in ("", HELD_OUT):
            for name, group in groups.items():
                numbers = in_percent(group, reward, end)
                nothing = in_percent(controls.get(name, []), reward, end)
                gains = differences(numbers, nothing)
                rows = {named(reward, name, end): numbers, named(reward, control(name), end): nothing}
                measured |= {key: row for key, row in (rows | {gain(reward, name, end): gains}).items() if row}
    panels = {
        reward: {**groups, **{control(name): controls[name] for name in groups if name in controls}}
        for reward, groups in rewards.items()
    }
    claims = [claim for reward in rewards for claim in claims_about(reward, colours=has_colours(runs))]
    if not panels:
        return Report(measured, claims, {}, {})
    count = len(by(runs, "seed"))
    captions = {
        "figure": f"The mean reward of samples over the number of scored samples, before, during and after training: "
        f"{medians_in_words(count)}. Without a reward, the same "
        "estimator learns random numbers.",
        "pictures": "Samples from the same noise before and after training, of the first seed; one caption for each, "
        "none chosen by hand.",
    }
    return Report(measured, claims, {"figure": figure(panels), "pictures": pictures(panels)}, captions)


def estimators(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Groups the runs on one reward by estimator, in the paper's order."""
    groups = by(runs, "estimator")
    return {NAMES[name]: groups[name] for name in NAMES if name in groups}


def control(name: str) -> str:
    """What the runs of an estimator without a reward are called."""
    return f"{name}, no reward"


def check_equal(runs: Sequence[Run]) -> None:
    """Raises an error if the runs scored unequal numbers of samples, or made unequal numbers of updates."""
    for name, what in (("queries", "scored samples"), ("step", "updates")):
        counts = {f"{int(run.history[-1][name])} by {NAMES[run.config['estimator']]}" for run in runs}
        if len({run.history[-1][name] for run in runs}) > 1:
            raise ValueError(
                f"the runs have unequal numbers of {what}: {', '.join(sorted(counts))}; equal numbers are needed. "
                "Give the folders of one sweep, or of one training."
            )


# Numbers and claims ----------------------------------------------------------------------------------------------


def in_percent(runs: Sequence[Run], reward: str, end: str) -> dict[int, list[float]]:
    """A reward after training by seed: for each caption, in per cent of what the reward can change by."""
    known = [run for run in runs if reward + end in run.per_prompt]
    scale = 100 / REACHABLE.get(reward, 1.0)
    return of_seeds(known, lambda run: [scale * value for value in run.per_prompt[reward + end]])


def differences(numbers: Mapping[int, list[float]], others: Mapping[int, list[float]]) -> dict[int, list[float]]:
    """Number - other for each seed that both have, and each caption."""
    return {
        seed: [one - other for one, other in zip(numbers[seed], others[seed], strict=True)]
        for seed in sorted(numbers.keys() & others.keys())
    }


def named(reward: str, name: str, end: str = "") -> str:
    """The name of a reward after training."""
    return f"{reward} by {name}" + (", other captions" if end else "")


def gain(reward: str, name: str, end: str = "") -> str:
    """The name of an estimator's gain over its control."""
    return f"gain in {named(reward, name, end)}"


def has_colours(runs: Sequence[Run]) -> bool:
    """Whether the runs learn half of the captions of coloured shapes, which come in groups by colour."""
    return all(run.config["model"] == "shapes" and run.config["hold_out"] for run in runs)


def claims_about(reward: str, *, colours: bool) -> Iterator[Claim]:
    """The paper's claims about a reward; `colours` groups the captions of coloured shapes by colour."""
    groups = {end: tuple(caption.split()[1] for caption in asked) if colours else () for end, asked in HALVES.items()}
    shared = {"kind": "more", **margin_fields(PAPER, "reward"), "scale": SCALE}
    yield Claim(
        f"{reward}: IS raises it above the control without a reward",
        (gain(reward, "IS"),),
        place="section 6.1, figure 4",
        groups=groups[""],
        **shared,
    )
    yield Claim(
        f"{reward}: IS raises it for captions that it was not trained on",
        (gain(reward, "IS", HELD_OUT),),
        place="section 6.3",
        groups=groups[HELD_OUT],
        **shared,
    )
    for first, second in (("IS", "RWR"), ("SF", "RWR"), ("IS", "SF")):
        yield Claim(
            f"{reward}: {first} gains more than {second} from as many samples and updates",
            (gain(reward, first), gain(reward, second)),
            place="section 6.1, figure 4",
            groups=groups[""],
            **shared,
        )


# Figures ---------------------------------------------------------------------------------------------------------


def curve(run: Run, reward: str) -> Curve:
    """Returns a reward over the number of scored samples: before training, means during training, and after it.

    Each mean is over at least POINT samples, and its x is the middle of their range.
    """
    key = "reward_mean" if run.config["reward"] == reward else f"other/{reward}"
    total, seen = run.curve("queries", key)
    size = -(-POINT * len(total) // int(total[-1]))
    blocks = [slice(start, start + size) for start in range(0, len(total), size)]
    xs = [mean([total[block][0] - total[0], total[block][-1]]) for block in blocks]
    ys = [mean(seen[block]) for block in blocks]
    return [0, *xs, total[-1]], [run.summary[at(BEFORE, reward)], *ys, run.summary[reward]]


def figure(rewards: Mapping[str, Estimators]) -> plt.Figure:
    """Plots the paper's figure 4: a panel for each reward, a curve for each estimator and each control."""
    count = len(rewards)
    plot, axes = plt.subplots(1, count, figsize=(5.6 * count, 4), layout="constrained", squeeze=False)
    for axis, (reward, groups) in zip(axes.flat, rewards.items(), strict=True):
        curves(axis, {name: [curve(run, reward) for run in group] for name, group in groups.items()})
        axis.set_title(reward, fontsize=10)
        axis.set_xlabel("scored samples")
        axis.set_ylabel("mean reward" + (" (kB)" if reward.startswith("jpeg") else ""))
    return plot


def pictures(rewards: Mapping[str, Estimators]) -> plt.Figure:
    """Shows a row for each reward: samples from the same noise before and after, of each estimator's first seed."""
    columns = 1 + max(len(groups) for groups in rewards.values())
    shape = (2.6 * columns, 3.1 * len(rewards))
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
            axis.set_title(f"{reward}:\n{name}", fontsize=8)
    return plot


if __name__ == "__main__":
    main(TITLE, CLAIM, read)
