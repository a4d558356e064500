"""Judges DDPO's estimators against each other, from as many samples, each at the rate that keeps the quality.

python -m experiments.black_2023_estimators.report FOLDER ...
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from matplotlib import pyplot as plt

from experiments.black_2023_ddpo.report import (
    BASE,
    HALVES,
    NAMES,
    WITH_KL,
    comparisons,
    gain,
    methods,
    quality,
)
from experiments.black_2023_ddpo.report import read as read_ddpo
from experiments.claims import Claim
from experiments.emoji.judging import AFTER, BEFORE, CONTROL, KEPT, SCALE, first_seed, picture_rows
from experiments.margins import margin_fields
from experiments.reports import Report, main
from experiments.run_folders import Run

PAPER = "black_2023_estimators"
TITLE = "DDPO's estimators side by side"
CLAIM = (
    "Black et al. 2023, arXiv:2305.13301: importance sampling (IS) gains more than the score function (SF), and both "
    "more than reward-weighted regression (RWR)."
)
REWARD = "warmth"
ELSEWHERE = "black_2023_ddpo judges it, from the same runs"
LEARNT = (*NAMES.values(), NAMES["is"] + WITH_KL)


def read(runs: Sequence[Run]) -> Report:
    """Reads what black_2023_ddpo's report does; the claims compare the estimators."""
    report = read_ddpo(runs)
    if not report.figures:
        return report
    shown = pictures(runs)
    captions = report.captions | {
        "pictures": "The same captions from the same noise: before training, and after the training on warmth by each "
        "estimator; the first seed, the first captions.",
    }
    return replace(report, claims=[*claims()], figures=report.figures | {"pictures": shown}, captions=captions)


def claims() -> Iterator[Claim]:
    """The paper's comparisons, and what each estimator keeps of the quality."""
    yield from comparisons(REWARD, PAPER)
    shared: dict[str, Any] = {"kind": "more", "scale": SCALE, "groups": tuple(each.split()[1] for each in HALVES[""])}
    for name in LEARNT:
        yield Claim(
            f"{REWARD}: {name} keeps more than {KEPT:.0f}% of the base model's quality",
            (quality(REWARD, name),),
            origin="ours",
            than=KEPT,
            trivial=ELSEWHERE if name == NAMES["is"] else "",
            **shared | margin_fields(PAPER, "quality"),
        )
    for name in NAMES.values():
        yield Claim(
            f"{REWARD}: {name} raises it above its control without a reward",
            (gain(REWARD, name),),
            place="section 6.1, figure 4",
            trivial="the reward is optimised",
            **shared | margin_fields(PAPER, "reward"),
        )


def pictures(runs: Sequence[Run]) -> plt.Figure:
    """Shows pictures of the same captions in rows: before training, and after it by each estimator."""
    groups = methods([run for run in runs if run.config["reward"] != CONTROL])
    first = first_seed(next(iter(groups.values())))
    rows = [("before training", first.folder / BEFORE)]
    rows += [(name, first_seed(group).folder / AFTER) for name, group in groups.items()]
    return picture_rows(rows, BASE.captions if first.config["model"] == "emoji" else ())


if __name__ == "__main__":
    main(TITLE, CLAIM, read)
