"""Judges GRPO and rejection-sampling fine-tuning on sums: `python -m experiments.shao_2024_grpo.report FOLDER ...`."""

from collections.abc import Iterator, Mapping, Sequence
from math import log2
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.claims import Claim, Numbers
from experiments.figures import curves, panels
from experiments.margins import margin_fields
from experiments.reports import Report, main
from experiments.run_folders import Run, by, of_seeds
from experiments.samples import samples_of
from experiments.shao_2024_grpo.train import RunConfig, sums

PAPER = "shao_2024_grpo"
TITLE = "Sums by GRPO"
CLAIM = (
    "Shao et al. 2024, arXiv:2402.03300: answers that a program checks are enough to learn from, the mean of a group "
    "of answers is a baseline that needs no value model, and GRPO gains more than fine-tuning on right answers, online "
    "or offline. Reinforcement learning raises Maj@K, not Pass@K."
)
METHODS = {"grpo": "GRPO", "online_rft": "online RFT", "rft": "RFT"}
SIZE = ("per_device_train_batch_size", "num_generations", "gradient_accumulation_steps", "max_steps")
SCALE = "135M parameters and 256 answers to sums"


def read(runs: Sequence[Run]) -> Report:
    """Reads accuracy, Maj@K and Pass@K of each held-out sum, before and after, and the gradient's variance."""
    check_equal(runs)
    methods = {METHODS[name]: group for name, group in by(runs, "method").items()}
    most = runs[0].config["eval_answers"]
    measured: dict[str, Numbers] = {}
    for name, group in methods.items():
        for score in ("right", f"maj@{most}", f"pass@{most}"):
            for when in ("", "_before"):
                known = [run for run in group if score + when in run.per_prompt]
                if values := of_seeds(known, lambda run, key=score + when: run.per_prompt[key]):
                    measured[f"{score}{when.replace('_', ' ')}, {name}"] = values
        if ratios := of_seeds([run for run in group if "variance/raw" in run.summary], variance_ratio):
            measured[f"variance ratio, {name}"] = ratios
    seeds = len(by(runs, "seed"))
    captions = {
        "figure": "(a) Right answers in training. (b) Right answers to held-out sums; each dot is one of "
        f"{seeds} seeds, and the line is their mean. (c) Maj@K and Pass@K of held-out sums before and after GRPO. "
        "Curves are medians of the seeds, bands go from the lower to the upper quartile."
    }
    samples = samples_of({name: group[0] for name, group in methods.items()})
    claims = list(claims_about(most, first_numbers(runs[0])))
    return Report(measured, claims, {"figure": figure(methods, most)}, captions, samples)


def check_equal(runs: Sequence[Run]) -> None:
    """Raises an error if runs are of another program, or learnt from unequal numbers of answers."""
    if strange := [str(run.folder) for run in runs if "right" not in run.per_prompt]:
        raise ValueError(f"no accuracy per sum is in {', '.join(strange)}. Give folders of train.py's runs.")
    counts = {f"{answers(run)} of {run.config['method']}" for run in runs}
    if len({answers(run) for run in runs}) > 1:
        raise ValueError(
            f"the runs learnt from unequal numbers of answers: {', '.join(sorted(counts))}; equal numbers are needed. "
            "Give the folders of one size."
        )


def first_numbers(run: Run) -> list[str]:
    """The first number of each sum that a run is evaluated on."""
    config = RunConfig(largest=run.config["largest"], eval_prompts=run.config["eval_prompts"])
    prompts = sums(config, seed=0)[run.config["eval_split"]]["prompt"]
    return [prompt.splitlines()[-1].partition("+")[0] for prompt in prompts]


def answers(run: Run) -> int:
    """Returns the number of answers that each process of a run learns from."""
    prompts, generations, accumulated, steps = (run.config[name] for name in SIZE)
    return prompts * generations * accumulated * steps


def variance_ratio(run: Run) -> float:
    """Returns log2 of the gradient's variance with the group's mean taken off, over that of the raw reward."""
    return log2(run.summary["variance/centred"] / run.summary["variance/raw"])


def claims_about(most: int, groups: Sequence[str] = ()) -> Iterator[Claim]:
    """The paper's claims, and ours on the variance.

    Args:
        most: The number K of answers to a sum.
        groups: The first number of each sum. Sums that share it are a group, because they may share what is hard.
    """
    shared = {**margin_fields(PAPER, "accuracy"), "scale": SCALE, "groups": tuple(groups)}
    yield Claim(
        "GRPO raises the accuracy on sums that it was not trained on",
        ("right, GRPO", "right before, GRPO"),
        "more",
        place="section 4.2, table 5",
        number="GSM8K 82.9% to 88.2%, MATH 46.8% to 51.7%",
        trivial="the accuracy is optimised",
        **shared,
    )
    for text, score, kind in (("raises Maj@{}", "maj@{}", "more"), ("leaves Pass@{} as it is", "pass@{}", "little")):
        names = f"{score.format(most)}, GRPO", f"{score.format(most)} before, GRPO"
        yield Claim(f"GRPO {text.format(most)}", names, kind, place="section 5.2.2, figure 7", **shared)
    for first, second in (("online RFT", "RFT"), ("GRPO", "online RFT")):
        yield Claim(
            f"{first} is more accurate than {second} after as many answers",
            (f"right, {first}", f"right, {second}"),
            "more",
            place="section 5.2.1, figure 5",
            **shared,
        )
    yield Claim(
        "the group's mean lowers the variance of the policy gradient at the pretrained weights",
        ("variance ratio, GRPO",),
        "less",
        **margin_fields(PAPER, "variance"),
        origin="ours",
    )


def figure(methods: Mapping[str, Sequence[Run]], most: int) -> Figure:
    """Plots accuracy in training, accuracy after it, and Maj@K and Pass@K over K."""
    plot, (learning, after, over_k) = panels(("in training", "sums not trained on", "sums not trained on, GRPO"))
    curves(learning, {name: [_learning(run) for run in group] for name, group in methods.items()})
    learning.set_xlabel("answers learnt from")
    learning.set_ylabel("share of right answers")
    _dots(after, methods)
    after.set_ylabel("share of right answers")
    over_k.set_xlabel("K, answers to a sum")
    over_k.set_ylabel("share of sums")
    over_k.set_xscale("log", base=2)
    whole = [run for run in methods.get("GRPO", []) if "right_before" in run.per_prompt]
    if whole:
        names = {"Maj@K": "maj@", "Pass@K": "pass@"}
        times = {"before": "_before", "after": ""}
        curves(
            over_k,
            {
                f"{title} {time}": [_over_k(run, name, when, most) for run in whole]
                for title, name in names.items()
                for time, when in times.items()
            },
        )
    return plot


def _learning(run: Run) -> tuple[list[float], list[float]]:
    steps, rewards = run.curve("step", "reward")
    return [step * answers(run) / run.config["max_steps"] for step in steps], rewards


def _dots(axis: Axes, methods: Mapping[str, Sequence[Run]]) -> None:
    """Plots a dot for each run, and the mean of each method; first the accuracies before training."""
    columns = {"before": [run.summary["right_before"] for group in methods.values() for run in group if _knows(run)]}
    columns |= {name: [run.summary["right"] for run in group] for name, group in methods.items()}
    for i, (name, values) in enumerate((name, values) for name, values in columns.items() if values):
        axis.plot([name] * len(values), values, f"C{(i - 1) % 10}o" if i else "ko", alpha=0.6, markersize=4)
        axis.hlines(fmean(values), i - 0.2, i + 0.2, color="k")
    axis.grid(alpha=0.3)


def _knows(run: Run) -> bool:
    return "right_before" in run.summary


def _over_k(run: Run, name: str, when: str, most: int) -> tuple[list[float], list[float]]:
    sizes = [2**i for i in range(most.bit_length())]
    return [float(size) for size in sizes], [run.summary[f"{name}{size}{when}"] for size in sizes]


if __name__ == "__main__":
    main(TITLE, CLAIM, read)
