"""Judges whether the gold score fell while its proxy rose: `python -m experiments.gao_2022_overoptimization.report`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import fmean, median

from matplotlib import pyplot as plt

from experiments.figures import Verdict
from experiments.gao_2022_overoptimization.curve import Fit, fit, running_mean
from experiments.reports import Report, main, spread
from experiments.runs import Run, by
from experiments.sentiment_ppo import KL, REWARD, samples_of

TITLE = "Overoptimization of a proxy reward"
CLAIM = (
    "Gao et al. 2022, arXiv:2210.10760: as the root of the KL to the initial policy grows, the gold score rises, peaks "
    "and falls while the proxy's keeps rising; a proxy of more labels moves the peak out."
)
GOLD = "gold/mean"
WIDTH = 5  # steps per mean; the reward of a single batch is noisy
FALL = 0.2  # of gold's deviation: twice the standard error of the difference of two means over 5 batches of 32


@dataclass(frozen=True)
class Course:
    """A run's distances (roots of the KL) and both scores, as running means over WIDTH steps, [N] each."""

    distance: Sequence[float]
    gold: Sequence[float]
    proxy: Sequence[float]
    fit: Fit

    @property
    def best(self) -> int:
        """The index of the highest gold score."""
        return max(range(len(self.gold)), key=self.gold.__getitem__)

    @property
    def peak(self) -> float:
        """The distance at the peak of the fitted curve, or the last distance if that is smaller."""
        return min(self.fit.peak, self.distance[-1])


def judge(runs: Sequence[Run]) -> Report:
    """Judges gold's peak and fall and the proxy for each number of labels, and the peaks of neighbouring numbers."""
    groups = {labels: [course(run) for run in group] for labels, group in by(filter(is_long, runs), "labels").items()}
    verdicts = [verdict for labels, group in groups.items() for verdict in of_labels(labels, group)]
    verdicts += [verdict for pair in pairwise(groups.items()) for verdict in moves_out(*pair)]
    examples = {f"{labels} labels": group[0] for labels, group in by(runs, "labels").items()}
    return Report(verdicts, {"figure": figure(runs)}, samples_of(examples))


def is_long(run: Run) -> bool:
    """Whether a run has two means without a common step. Shorter runs are plotted and not judged."""
    return len(points(run)[0]) >= 2 * WIDTH


def course(run: Run) -> Course:
    """Reads a run's course from its history, whose numbers are means over a batch."""
    distances, golds, proxies = points(run)
    smooth = [running_mean(values, WIDTH) for values in (distances, golds, proxies)]
    return Course(*smooth, fit(distances, golds))


def points(run: Run) -> tuple[list[float], list[float], list[float]]:
    """Returns the root of the KL, gold and proxy at each step. An estimate of the KL below 0 counts as 0."""
    rows = [row for row in run.history if GOLD in row]
    if not rows:
        raise ValueError(f"{run.folder} logged no {GOLD}; runs of this experiment's train.py are needed.")
    return [max(row[KL], 0.0) ** 0.5 for row in rows], [row[GOLD] for row in rows], [row[REWARD] for row in rows]


def of_labels(labels: int, courses: Sequence[Course]) -> Iterator[Verdict]:
    """Judges the runs of one number of labels in every seed. Both scores are in deviations of the initial policy's."""
    peaks, ends = [max(course.gold) for course in courses], [course.gold[-1] for course in courses]
    yield Verdict(f"{labels} labels: gold rises", f"a peak above {FALL}", spread(peaks, ".2f"), min(peaks) > FALL)
    falls = [peak - end for peak, end in zip(peaks, ends, strict=True)]
    claim = f"{labels} labels: gold then falls"
    yield Verdict(claim, f"by more than {FALL} from its peak", f"by {spread(falls, '.2f')}", min(falls) > FALL)
    # A seed whose gold is highest at the end failed above, and has no steps after its peak.
    falling = [course for course in courses if course.best < len(course.gold) - 1]
    if falling:
        rises = [course.proxy[-1] - course.proxy[course.best] for course in falling]
        claim = f"{labels} labels: the proxy rises from gold's peak to the end"
        yield Verdict(claim, "a gain above 0", spread(rises, "+.2f"), min(rises) > 0)


def moves_out(fewer: tuple[int, Sequence[Course]], more: tuple[int, Sequence[Course]]) -> Iterator[Verdict]:
    """Compares two numbers of labels by the medians of the fitted peak's distance and of the highest gold score."""
    values = {
        "peaks further out (root of the KL)": [[course.peak for course in group] for _, group in (fewer, more)],
        "reach a higher gold": [[max(course.gold) for course in group] for _, group in (fewer, more)],
    }
    for change, (low, high) in values.items():
        claim = f"{more[0]} labels: {change} than {fewer[0]}"
        yield Verdict(claim, f"above {spread(low, '.2f')}", spread(high, ".2f"), median(high) > median(low))


def figure(runs: Sequence[Run]) -> plt.Figure:
    """Plots the paper's figure 1: gold (dots, and its fit as a line) and proxy (dashed) over the root of the KL."""
    plot, axis = plt.subplots(figsize=(7, 4.6), layout="constrained")
    for labels, group in by(runs, "labels").items():
        courses = [points(run) for run in group]
        distances, golds, proxies = (list(chain.from_iterable(columns[i] for columns in courses)) for i in range(3))
        (dots,) = axis.plot(distances, golds, ".", alpha=0.4, markersize=4)
        axis.plot(*binned(distances, proxies), "--", color=dots.get_color(), linewidth=1)
        xs = [max(distances) * i / 100 for i in range(101)]
        ys = list(map(fit(distances, golds), xs)) if any(map(is_long, group)) else []
        label = f"{labels} labels ({len(group)} seed{'s' * (len(group) > 1)})"
        axis.plot(xs[: len(ys)], ys, color=dots.get_color(), label=label)
    axis.plot([], [], "-", color="tab:gray", label="gold, fitted: d (α - β log d)")
    axis.plot([], [], "--", color="tab:gray", linewidth=1, label="proxy")
    axis.axhline(0, color="tab:gray", linewidth=0.8)
    axis.set_xlabel("d, the root of the KL to the initial policy (nats per response)")
    axis.set_ylabel("score (deviations of the initial policy's)")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8)
    return plot


def binned(xs: Sequence[float], ys: Sequence[float], *, width: float = 0.75) -> tuple[list[float], list[float]]:
    """Averages the points in each interval of x, in the order of x."""
    bins: dict[int, list[tuple[float, float]]] = {}
    for x, y in zip(xs, ys, strict=True):
        bins.setdefault(int(x / width), []).append((x, y))
    means = [(fmean(x for x, _ in pairs), fmean(y for _, y in pairs)) for _, pairs in sorted(bins.items())]
    return [x for x, _ in means], [y for _, y in means]


if __name__ == "__main__":
    main(TITLE, CLAIM, judge)
