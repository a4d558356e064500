"""Judges runs of GRPO on sums: `python -m experiments.shao_2024_grpo.report FOLDER ...`."""

from collections.abc import Sequence
from statistics import median

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.figures import Verdict, curves
from experiments.reports import Report, main, spread
from experiments.runs import Run, by

TITLE = "Sums by GRPO"
CLAIM = (
    "Shao et al. 2024, arXiv:2402.03300: answers that a program checks are enough to learn from; the mean of a group "
    "of answers is a baseline that needs no value model; and one call of generation can serve several updates."
)
ADVANTAGES = {
    "group": "less the group's mean, over its deviation",
    "batch": "less the group's mean, over the batch's deviation",
    "none": "less the group's mean",
    "raw": "the reward itself",
}
SIZE = ("per_device_train_batch_size", "num_generations", "gradient_accumulation_steps", "max_steps")

Pair = tuple[Run, Run]


def judge(runs: Sequence[Run]) -> Report:
    """Judges accuracy on the runs with the most answers, and generation on all runs."""
    if strange := [str(run.folder) for run in runs if not {"right", "right_before"} <= run.summary.keys()]:
        raise ValueError(f"no accuracy is in the summary of {', '.join(strange)}. Give folders of train.py's runs.")
    most = max(answers(run) for run in runs)
    long = [run for run in runs if answers(run) == most and run.config["steps_per_generation"] == 1]
    verdicts = [
        *(verdict for same in by(long, *SIZE).values() for verdict in (*rises(same), *baselines(same))),
        *(verdict for same in by(runs, *SIZE, "scale_rewards").values() for verdict in generation(same)),
    ]
    return Report(verdicts, {"figure": figure(long, runs)})


def answers(run: Run) -> int:
    """Returns the number of answers that each process of a run learns from."""
    prompts, generations, accumulated, steps = (run.config[name] for name in SIZE)
    return prompts * generations * accumulated * steps


def rises(runs: Sequence[Run]) -> list[Verdict]:
    """Judges whether GRPO as published raises accuracy; no verdict without its runs. The runs have one size."""
    known = by(runs, "scale_rewards").get("group", [])
    if not known:
        return []
    before, after = ([run.summary[name] for run in known] for name in ("right_before", "right"))
    higher = sum(last > first for first, last in zip(before, after, strict=True))
    claim = f"GRPO raises accuracy on sums never trained on{_group_size(known)}"
    obtained = f"{spread(before)} before, {spread(after)} after: higher in {higher} of {len(known)}"
    return [Verdict(claim, "higher after, in every seed", obtained, higher == len(known))]


def baselines(runs: Sequence[Run]) -> list[Verdict]:
    """Judges whether each advantage with the group's mean beats the reward itself. The runs have one size."""
    kinds, verdicts = by(runs, "scale_rewards"), []
    for kind in ("group", "batch", "none"):
        if not (pairs := paired(kinds.get(kind, []), kinds.get("raw", []))):
            continue
        ours, others = ([run.summary["right"] for run in side] for side in zip(*pairs, strict=True))
        higher = sum(our > other for our, other in zip(ours, others, strict=True))
        claim = f"the group baseline ({ADVANTAGES[kind]}) beats no baseline{_group_size(runs)}"
        expected = f"higher accuracy after {answers(runs[0])} answers, in every seed"
        obtained = f"{spread(ours)} against {spread(others)}: higher in {higher} of {len(pairs)}"
        verdicts.append(Verdict(claim, expected, obtained, higher == len(pairs)))
    return verdicts


def generation(runs: Sequence[Run]) -> list[Verdict]:
    """Judges how many calls and seconds steps_per_generation saves. The runs differ in it and in their seed alone."""
    kinds, verdicts = by(runs, "steps_per_generation"), []
    for factor in sorted(set(kinds) - {1}):
        if not (pairs := paired(kinds.get(1, []), kinds[factor])):
            continue
        calls, seconds = (
            [one.summary[name] / other.summary[name] for one, other in pairs]
            for name in ("generation_calls", "generation_seconds")
        )
        name, size = f"steps_per_generation={factor}", per_step(runs[0])
        verdicts += [
            Verdict(
                f"{name} cuts the calls of generation by its factor, at {size} answers a step",
                f"{factor} times fewer, in every seed",
                f"{spread(calls, '.2f')} times fewer",
                all(call == factor for call in calls),
            ),
            Verdict(
                f"{name} cuts the seconds of generation by its factor, at {size} answers a step",
                f"at least {factor} times fewer, in the median",
                f"{spread(seconds, '.2f')} times fewer",
                median(seconds) >= factor,
            ),
        ]
    return verdicts


def per_step(run: Run) -> int:
    """Returns the number of answers per optimizer step."""
    return answers(run) // run.config["max_steps"]


def paired(ones: Sequence[Run], others: Sequence[Run]) -> list[Pair]:
    """Returns the pairs of runs with the same seed."""
    of_seed = {run.config["seed"]: run for run in others}
    return [(run, of_seed[run.config["seed"]]) for run in ones if run.config["seed"] in of_seed]


def _group_size(runs: Sequence[Run]) -> str:
    return f", {runs[0].config['num_generations']} answers to a sum"


def figure(long: Sequence[Run], runs: Sequence[Run]) -> Figure:
    """Plots accuracy in training, accuracy before and after it, and the seconds of generation per step."""
    plot, (learning, after, cost) = plt.subplots(1, 3, figsize=(14, 3.8), layout="constrained")
    learning.set_title("right answers in training", fontsize=10)
    learning.set_xlabel("answers learnt from")
    after.set_title("right answers to sums never trained on", fontsize=10)
    cost.set_title("generation, seconds for each optimizer step", fontsize=10)
    cost.set_xlabel("steps_per_generation")
    if long:
        curves(learning, {_label(key): [_learning(run) for run in known] for key, known in _kinds(long).items()})
        _before_and_after(after, long)
    _seconds(cost, runs)
    return plot


def _kinds(runs: Sequence[Run]) -> dict[tuple[str, int], list[Run]]:
    return by(runs, "scale_rewards", "num_generations")


def _label(key: tuple[str, int]) -> str:
    return f"{ADVANTAGES[key[0]]}, {key[1]} to a sum"


def _learning(run: Run) -> tuple[list[float], list[float]]:
    steps, rewards = run.curve("step", "reward")
    return [step * per_step(run) for step in steps], rewards


def _before_and_after(axis: Axes, runs: Sequence[Run]) -> None:
    """Plots a line from before to after for each run, in the colours of `curves`."""
    for i, known in enumerate(_kinds(runs).values()):
        for run in known:
            axis.plot(("before", "after"), (run.summary["right_before"], run.summary["right"]), f"C{i}o-", alpha=0.7)
    axis.grid(alpha=0.3)


def _seconds(axis: Axes, runs: Sequence[Run]) -> None:
    """Plots seconds per step over steps_per_generation, with a dashed line of exact proportionality."""
    for i, same in enumerate(by(runs, *SIZE, "scale_rewards").values()):
        kinds = by(same, "steps_per_generation")
        if len(kinds) < 2:
            continue
        first = min(kinds)
        base = median(seconds_per_step(run) for run in kinds[first])
        for factor, known in kinds.items():
            axis.plot([factor] * len(known), [seconds_per_step(run) for run in known], f"C{i}o", alpha=0.7)
        factors = range(first, max(kinds) + 1)
        label = f"{per_step(same[0])} answers a step, by its factor"
        axis.plot(factors, [base * first / factor for factor in factors], f"C{i}--", label=label)
    if axis.lines:
        axis.legend(frameon=False, fontsize=8)
    axis.set_ylim(bottom=0)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)


def seconds_per_step(run: Run) -> float:
    """Returns the seconds of generation per optimizer step."""
    return run.summary["generation_seconds"] / run.config["max_steps"]


if __name__ == "__main__":
    main(TITLE, CLAIM, judge)
