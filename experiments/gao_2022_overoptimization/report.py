"""Judges gold against its proxies: `python -m experiments.gao_2022_overoptimization.report FOLDER ...`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from experiments.claims import Claim, Numbers
from experiments.figures import panels
from experiments.gao_2022_overoptimization import best_of_n
from experiments.gao_2022_overoptimization.curve import BEST_OF_N, FORMS, RL, Fit, Form, fit, running_mean
from experiments.margins import margin_fields
from experiments.reports import Report, main
from experiments.run_folders import Run, by, of_seeds
from experiments.samples import samples_of
from experiments.sentiment_ppo import KL, REWARD

PAPER = "gao_2022_overoptimization"
TITLE = "Overoptimization of a proxy reward"
CLAIM = (
    "Gao et al. 2022, arXiv:2210.10760: as the root of the KL to the initial policy grows, the gold score rises, peaks "
    "and falls while the proxy's keeps rising; a proxy of more labels reaches a higher gold; best-of-n moves along the "
    "curve faster than RL."
)
GOLD, FIRST, SECOND = "gold/mean", "gold/first_half", "gold/second_half"
WIDTH = 5  # steps per mean; the reward of a single batch is noisy
EACH_DOUBLING = "{} of best-of-n for each doubling of the labels"
SCALE = "15M parameters and proxies of at most 512 labels"


@dataclass(frozen=True)
class Course:
    """A run's distances (roots of the KL) and scores, one for each step; gold also of each half of the batch."""

    distance: Sequence[float]
    gold: Sequence[float]
    halves: tuple[Sequence[float], Sequence[float]]
    proxy: Sequence[float]

    @property
    def is_long(self) -> bool:
        """Whether there are two means without a common step. Shorter runs are plotted and not judged."""
        return len(self.distance) >= 2 * WIDTH

    def at_peak(self) -> dict[str, float]:
        """Gold and proxy where gold is highest, and at the end, as means over WIDTH steps.

        One half of each batch determines the step of the peak, and the other half measures gold there; then the halves
        change places, and the results are averaged. If one half did both, noise alone would show a peak and a fall.
        """
        smooth = [running_mean(half, WIDTH) for half in self.halves]
        proxy = running_mean(self.proxy, WIDTH)
        peaks = [max(range(len(half)), key=half.__getitem__) for half in smooth]
        return {
            "gold at its peak": fmean((smooth[1][peaks[0]], smooth[0][peaks[1]])),
            "gold at the end": fmean((smooth[0][-1], smooth[1][-1])),
            "proxy at gold's peak": fmean(proxy[peak] for peak in peaks),
            "proxy at the end": proxy[-1],
        }

    def gold_at(self, distance: float) -> float:
        """Gold at a distance, interpolated between means over WIDTH steps."""
        points = sorted(zip(running_mean(self.distance, WIDTH), running_mean(self.gold, WIDTH), strict=True))
        distances, golds = zip(*points, strict=True)
        return float(np.interp(distance, distances, golds))


def course(run: Run) -> Course:
    """Reads a run's course from its history. An estimate of the KL below 0 counts as 0.

    Raises:
        ValueError: The run logged no gold score.
    """
    rows = [row for row in run.history if GOLD in row]
    if not rows:
        raise ValueError(f"{run.folder} logged no {GOLD}; runs of this experiment's train.py are needed.")
    distance = [max(row[KL], 0.0) ** 0.5 for row in rows]
    gold, first, second, proxy = ([row[name] for row in rows] for name in (GOLD, FIRST, SECOND, REWARD))
    return Course(distance, gold, (first, second), proxy)


def read(runs: Sequence[Run]) -> Report:
    """Reads RL's courses by number of labels, and best-of-n of the runs with the fewest."""
    groups = by(runs, "labels")
    courses = {run.folder: course(run) for run in runs}
    few, many = min(groups), max(groups)
    banks = {run.folder: best_of_n.read(run.folder) for run in groups[few]}
    measured: dict[str, Numbers] = {}
    for labels, group in groups.items():
        long = [run for run in group if courses[run.folder].is_long]
        if not long:
            continue
        for name in courses[long[0].folder].at_peak():
            measured[named(name, labels)] = of_seeds(long, lambda run, of=name: courses[run.folder].at_peak()[of])
    measured |= of_best_of_n(groups[few], banks)
    if all(courses[run.folder].is_long for run in runs):
        farthest = next(iter(banks.values()))[0].distances[-1]
        measured[f"gold of RL at best-of-n's distance, {many} labels"] = of_seeds(
            groups[many], lambda run: courses[run.folder].gold_at(farthest)
        )
        for form in FORMS:
            measured[quality(form, few)] = of_seeds(
                groups[few],
                lambda run, of=form: fit(of, courses[run.folder].distance, courses[run.folder].gold).quality,
            )
    examples = samples_of({f"{labels} labels": group[0] for labels, group in groups.items()})
    plotted = {labels: [courses[run.folder] for run in group] for labels, group in groups.items()}
    return Report(
        measured,
        list(claims_about(few, many, few_of(next(iter(banks.values()))))),
        {"figure": figure(plotted, list(banks.values()))},
        {"figure": caption(len(by(runs, "seed")))},
        examples,
    )


def of_best_of_n(runs: Sequence[Run], banks: Mapping[Path, Sequence[best_of_n.Curve]]) -> dict[str, Numbers]:
    """Best-of-n's gains for each prompt of the bank, by seed."""

    def slope(run: Run) -> list[float]:
        return by_doubling(banks[run.folder], [[row[-1] for row in curve.gold] for curve in banks[run.folder]])

    def coefficient(run: Run, name: str) -> list[float]:
        curves = banks[run.folder]
        fits = [[fit(BEST_OF_N, curve.distances, row) for row in curve.gold] for curve in curves]
        return by_doubling(curves, [[getattr(each, name) for each in row] for row in fits])

    def of_most(run: Run) -> best_of_n.Curve:
        return max(banks[run.folder], key=lambda curve: curve.labels)

    some = next(iter(banks.values()))
    is_curve, has_sizes = len(some[0].ns) > 3, len(some) > 1  # fewer points fit any curve
    measured: dict[str, Numbers] = {
        "gold of best-of-n": of_seeds(runs, lambda run: [row[-1] for row in of_most(run).gold]),
    }
    if is_curve:
        measured["quality of best-of-n's fit"] = of_seeds(
            runs, lambda run: fit(BEST_OF_N, of_most(run).distances, of_most(run).mean("gold")).quality
        )
        measured[turn(few_of(some))] = of_seeds(
            runs, lambda run: fall(min(banks[run.folder], key=lambda curve: curve.labels).gold)
        )
    if has_sizes:
        measured[EACH_DOUBLING.format("gold")] = of_seeds(runs, slope)
    if is_curve and has_sizes:
        for name in ("alpha", "beta"):
            measured[EACH_DOUBLING.format(name)] = of_seeds(runs, lambda run, of=name: coefficient(run, of))
    return measured


def few_of(curves: Sequence[best_of_n.Curve]) -> int:
    """The fewest labels of a proxy for best-of-n."""
    return min(curve.labels for curve in curves)


def by_doubling(curves: Sequence[best_of_n.Curve], values: Sequence[Sequence[float]]) -> list[float]:
    """For each prompt, the slope of its values, [labels, prompts], over log2 of the labels."""
    return np.polyfit(np.log2([curve.labels for curve in curves]), np.asarray(values), 1)[0].tolist()


def fall(gold: Sequence[Sequence[float]]) -> list[float]:
    """For each prompt, gold at the peak of best-of-n less gold at the largest n. gold: [P, len(ns)].

    The even prompts choose the n of the peak for the odd ones, and these for them, because the largest of noisy means
    is above its true value.
    """
    rows = np.asarray(gold)
    peaks = [int(rows[half::2].mean(0).argmax()) for half in (1, 0)]  # for even prompts, for odd ones
    return [float(row[peaks[i % 2]] - row[-1]) for i, row in enumerate(rows)]


def turn(labels: int) -> str:
    """The name of the fall of best-of-n's gold."""
    return f"fall of best-of-n's gold from its peak, {labels} labels"


def named(name: str, labels: int) -> str:
    """The name of a quantity of RL."""
    return f"{name}, {labels} labels"


def quality(form: Form, labels: int) -> str:
    """The name of the quality with which a form fits gold of RL."""
    return f"R^2 of the form of {form} for RL, {labels} labels"


def claims_about(few: int, many: int, fewest: int = 8) -> Iterator[Claim]:
    """The paper's claims for RL's proxies of few and of many labels, and best-of-n's of the fewest."""
    first, scores = (named(name, few) for name in ("gold at its peak", "proxy at gold's peak"))
    yield Claim(
        f"RL, {few} labels: gold rises above the initial policy's",
        (first,),
        "more",
        **margin_fields(PAPER, "score"),
        scale=SCALE,
        place="figure 1b",
    )
    yield Claim(
        f"RL, {few} labels: gold falls from its peak to the end",
        (first, named("gold at the end", few)),
        "more",
        **margin_fields(PAPER, "score"),
        scale=SCALE,
        place="figure 1b",
    )
    yield Claim(
        f"RL, {few} labels: the proxy rises from gold's peak to the end",
        (named("proxy at the end", few), scores),
        "more",
        **margin_fields(PAPER, "score"),
        scale=SCALE,
        place="figure 1b",
    )
    if many > few:
        yield Claim(
            f"RL: gold's peak is higher with {many} labels than with {few}",
            (named("gold at its peak", many), first),
            "more",
            **margin_fields(PAPER, "score"),
            scale=SCALE,
            place="section 3.3",
        )
    yield Claim(
        "best-of-n: gold at the largest n grows with each doubling of the labels",
        (EACH_DOUBLING.format("gold"),),
        "more",
        **margin_fields(PAPER, "score by data"),
        scale=SCALE,
        place="section 3.3",
    )
    for name, direction, kind in (("alpha", "grows", "more"), ("beta", "falls", "less")):
        yield Claim(
            f"best-of-n: {name} {direction} with each doubling of the labels",
            (EACH_DOUBLING.format(name),),
            kind,
            **margin_fields(PAPER, f"{name} by data"),
            scale=SCALE,
            place="section 3.2, figure 3, by the proxy's size",
        )
    yield Claim(
        f"best-of-n, {fewest} labels: gold falls from its peak to the largest n",
        (turn(fewest),),
        "more",
        **margin_fields(PAPER, "score"),
        scale=SCALE,
        place="figure 1a",
    )
    yield Claim(
        f"at the KL of the largest n, best-of-n has gained more gold than RL (most labels: best-of-n; {many}: RL)",
        ("gold of best-of-n", f"gold of RL at best-of-n's distance, {many} labels"),
        "more",
        **margin_fields(PAPER, "score"),
        scale=SCALE,
        place="sections 1 and 3.5",
    )
    yield Claim(
        f"RL, {few} labels: d (alpha - beta log d) fits gold better than best-of-n's form",
        (quality(RL, few), quality(BEST_OF_N, few)),
        "more",
        **margin_fields(PAPER, "difference of fits"),
        scale=SCALE,
        place="section 3.1",
    )
    yield Claim(
        "best-of-n: d (alpha - beta d) explains more than 0.9 of gold's variance",
        ("quality of best-of-n's fit",),
        "more",
        **margin_fields(PAPER, "quality of a fit"),
        scale=SCALE,
        trivial="two parameters are fitted to points that are nearly on a line",
        place="section 3.1",
        than=0.9,
    )


def caption(seeds: int) -> str:
    """What the figure shows."""
    return (
        f"(a) RL; a dot is a batch, the solid line the fit to gold of all {seeds} seeds, the dashed line the "
        "proxy's mean over the seeds. (b) Best-of-n for proxies of different numbers of labels, means over the "
        f"prompts and {seeds} seeds; lines: the fits. (c) One dot for each proxy of best-of-n, all numbers of "
        "labels and seeds; the line is a regression. Scores are in deviations of the initial policy's samples, so that "
        "the paper's points, on another scale, are not shown."
    )


def figure(rl: Mapping[int, Sequence[Course]], banks: Sequence[Sequence[best_of_n.Curve]]) -> plt.Figure:
    """Plots the paper's figure 1 for RL and best-of-n, and best-of-n's gold over the proxies' correlation."""
    titles = ("RL: gold (solid, fitted) and proxy (dashed)", "best-of-n: gold", "best-of-n at the largest n")
    plot, (left, middle, right) = panels(titles)
    for i, (labels, courses) in enumerate(rl.items()):
        distances, golds, proxies = (
            list(chain.from_iterable(getattr(course, name) for course in courses))
            for name in ("distance", "gold", "proxy")
        )
        left.plot(distances, golds, ".", alpha=0.35, markersize=4, color=f"C{i}")
        left.plot(*binned(distances, proxies), "--", color=f"C{i}", linewidth=1)
        if any(course.is_long for course in courses):
            fitted(left, fit(RL, distances, golds), max(distances), f"C{i}", f"{labels} labels")
    for i, curves in enumerate(zip(*banks, strict=True)):
        golds = np.mean([curve.mean("gold") for curve in curves], axis=0).tolist()
        middle.plot(curves[0].distances, golds, ".", color=f"C{i}")
        if len(golds) > 3:
            curve = fit(BEST_OF_N, curves[0].distances, golds)
            fitted(middle, curve, curves[0].distances[-1], f"C{i}", f"{curves[0].labels} labels")
    points = [(curve.correlation, curve.mean("gold")[-1]) for curves in banks for curve in curves]
    right.plot(*zip(*points, strict=True), ".")
    if len(points) > 1:
        xs, ys = np.array(points).T
        line = np.polyfit(xs, ys, 1)
        label = f"R$^2$ = {np.corrcoef(xs, ys)[0, 1] ** 2:.2f}"
        right.plot(np.sort(xs), np.polyval(line, np.sort(xs)), color="tab:gray", label=label)
        right.legend(frameon=False, fontsize=9)
    for axis in (left, middle, right):
        axis.axhline(0, color="tab:gray", linewidth=0.8)
        axis.set(xlabel="d, the root of the KL (root of nats)", ylabel="gain of the score (deviations)")
        axis.grid(alpha=0.3)
    right.set(xlabel="correlation of proxy and gold over the bank", ylabel="gain of gold (deviations)")
    return plot


def fitted(axis: Axes, curve: Fit, end: float, color: str, name: str) -> None:
    """Plots a fitted curve from 0 to `end`, with its quality in the legend."""
    xs = [end * i / 100 for i in range(101)]
    axis.plot(xs, list(map(curve, xs)), color=color, label=f"{name} (R$^2$ = {curve.quality:.2f})")
    axis.legend(frameon=False, fontsize=9)


def binned(xs: Sequence[float], ys: Sequence[float], *, width: float = 0.75) -> tuple[list[float], list[float]]:
    """Averages the points in each interval of x, in the order of x."""
    bins: dict[int, list[tuple[float, float]]] = {}
    for x, y in zip(xs, ys, strict=True):
        bins.setdefault(int(x / width), []).append((x, y))
    means = [(fmean(x for x, _ in pairs), fmean(y for _, y in pairs)) for _, pairs in sorted(bins.items())]
    return [x for x, _ in means], [y for _, y in means]


if __name__ == "__main__":
    main(TITLE, CLAIM, read)
