"""Judges PPO and best-of-n against fine-tuning: `python -m experiments.stiennon_2020_summarize.report FOLDER ...`."""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from matplotlib import pyplot as plt

from experiments.figures import Curve, Verdict, curves
from experiments.reports import Report, main, spread
from experiments.runs import Run, by

TITLE = "Fine-tuning, a reward model of comparisons, PPO and best-of-n"
CLAIM = (
    "Stiennon et al. 2020, arXiv:2009.01325: PPO and best-of-n against a reward model beat fine-tuning in the eyes of "
    "those who made its comparisons, and the reward model's accuracy grows with their number."
)
SAMPLES = "samples.json"
SFT, PPO, ACCURACY, BEST_OF = "gold_sft", "gold_ppo", "accuracy_", "gold_best_of_"


def judge(runs: Sequence[Run]) -> Report:
    """Judges the gains in gold score over the fine-tuned policy of the same run, and the reward models' accuracies."""
    whole = [run for run in runs if SFT in run.summary and PPO in run.summary]
    if not whole:
        raise ValueError(
            f"none of the {len(runs)} runs that came in has {SFT} and {PPO} in its summary: a run of train.py is "
            "needed. Give the folder of one."
        )
    verdicts = [
        beats(group, PPO, f"PPO at coefficient {coefficient:g}")
        for coefficient, group in by(whole, "init_kl_coef").items()
    ]
    for name in names(whole, BEST_OF):
        verdicts.append(beats([run for run in whole if name in run.summary], name, f"best of {number(name)}"))
    verdicts += grows(whole)
    figures = {"figure": figure(whole)}
    if learnt := [run for run in whole if any("ppo/step" in row for row in run.history)]:
        figures["training"] = training(learnt)
    return Report(verdicts, figures, samples(whole[0].folder))


def names(runs: Sequence[Run], prefix: str) -> list[str]:
    """Returns the names in the summaries that consist of the prefix and a count, sorted by the count."""
    return sorted({name for run in runs for name in run.summary if name.startswith(prefix)}, key=number)


def number(name: str) -> int:
    """Returns the count at the end of a name."""
    return int(name.rpartition("_")[2])


def beats(runs: Sequence[Run], name: str, title: str) -> Verdict:
    """Judges whether a policy has a higher gold score than the fine-tuned one, in each seed."""
    gains = [run.summary[name] - run.summary[SFT] for run in runs]
    before = spread([run.summary[SFT] for run in runs])
    return Verdict(
        f"{title} beats fine-tuning", f"more than {before}: a gain above 0", spread(gains, "+.3f"), min(gains) > 0
    )


def grows(runs: Sequence[Run]) -> Iterator[Verdict]:
    """Judges whether accuracy grows from fewest to most comparisons in each seed, and by each step in the median."""
    counts = names(runs, ACCURACY)
    runs = [run for run in runs if all(name in run.summary for name in counts)]
    if len(counts) < 2 or not runs:
        return
    first, last = counts[0], counts[-1]
    gains = [run.summary[last] - run.summary[first] for run in runs]
    claim = f"the reward model of {number(last)} comparisons is more accurate than that of {number(first)}"
    yield Verdict(claim, "a gain above 0", spread(gains, "+.3f"), min(gains) > 0)
    middles = [median(run.summary[name] for run in runs) for name in counts]
    passed = all(later > earlier for earlier, later in pairwise(middles))
    claim = f"accuracy grows at {', '.join(str(number(name)) for name in counts)} comparisons"
    yield Verdict(claim, "each median above the one before", ", ".join(f"{value:.3f}" for value in middles), passed)


def figure(runs: Sequence[Run]) -> plt.Figure:
    """Plots gold score over the KL to the fine-tuned policy, and accuracy over the number of comparisons."""
    plot, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    ranks = [SFT, *names(runs, BEST_OF)]
    curves(left, {"best of n": [policies(run, [name for name in ranks if name in run.summary]) for run in runs]})
    for i, (coefficient, group) in enumerate(by(runs, "init_kl_coef").items(), start=1):
        points = [(run.summary["kl_ppo"], run.summary[PPO]) for run in group]
        left.scatter(*zip(*points, strict=True), marker="s", color=f"C{i}", label=f"PPO, coefficient {coefficient:g}")
    left.axhline(
        median(run.summary["gold_reference"] for run in runs),
        color="tab:gray",
        linestyle="--",
        linewidth=0.8,
        label="the texts' writers",
    )
    left.legend(frameon=False, fontsize=8)
    left.set(xlabel="KL to the fine-tuned policy (nats per answer)", ylabel="gold score of held-out prompts")
    if any(names([run], ACCURACY) for run in runs):
        curves(right, {"reward model": [accuracies(run) for run in runs if names([run], ACCURACY)]})
    right.set(xlabel="comparisons learnt from", ylabel="accuracy on other comparisons", xscale="log")
    counts = [number(name) for name in names(runs, ACCURACY)]
    right.set_xticks(counts, [str(count) for count in counts])
    right.set_xticks([], minor=True)
    return plot


def policies(run: Run, ranks: Sequence[str]) -> Curve:
    """Returns KL and gold score of the fine-tuned policy and of best-of-n."""
    return [run.summary[name.replace("gold", "kl", 1)] for name in ranks], [run.summary[name] for name in ranks]


def accuracies(run: Run) -> Curve:
    """Returns the numbers of comparisons, and the accuracies of the reward models."""
    known = names([run], ACCURACY)
    return [float(number(name)) for name in known], [run.summary[name] for name in known]


def training(runs: Sequence[Run]) -> plt.Figure:
    """Plots PPO's reward, gold score and KL over its steps."""
    plot, axes = plt.subplots(1, 3, figsize=(13, 3.4), layout="constrained")
    panels = {"ppo/mean_scores": "reward model's score", "ppo/gold": "gold score", "objective/kl": "KL (nats)"}
    for axis, (key, title) in zip(axes, panels.items(), strict=True):
        groups = by(runs, "init_kl_coef").items()
        curves(axis, {f"coefficient {value:g}": [steps(run, key) for run in group] for value, group in groups})
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("PPO step")
    return plot


def steps(run: Run, key: str) -> Curve:
    """Returns a logged number over PPO's steps; where a resumed run repeated a step, its later value."""
    values = dict(zip(*run.curve("ppo/step", key), strict=True))
    return sorted(values), [values[step] for step in sorted(values)]


def samples(folder: Path) -> dict[str, list[str]]:
    """Reads a run's samples: prompts with the answer of each policy."""
    file = folder / SAMPLES
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


if __name__ == "__main__":
    main(TITLE, CLAIM, judge)
