"""Judges GRPO and rejection-sampling fine-tuning on sums: `python -m experiments.shao_2024_grpo.report FOLDER ...`."""

from collections.abc import Iterator, Mapping, Sequence
from math import log2, prod
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.best_of import powers
from experiments.claims import Claim, Numbers
from experiments.figures import curves, panels
from experiments.margins import margin_fields
from experiments.reports import Report, main
from experiments.run_folders import Run, by, of_seeds
from experiments.samples import samples_of
from experiments.shao_2024_grpo.answers import pass_at
from experiments.shao_2024_grpo.train import MOST, SumsConfig, sums

PAPER = "shao_2024_grpo"
TITLE = "Sums by GRPO"
CLAIM = (
    "Shao et al. 2024, arXiv:2402.03300: answers that a program checks are enough to learn from, the mean of a group "
    "of answers is a baseline that needs no value model, and GRPO gains more than fine-tuning on right answers, online "
    "or offline. Reinforcement learning raises Maj@K, not Pass@K."
)
METHODS = {
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "ppo": "PPO",
    "online_rft": "online RFT",
    "rft": "RFT",
    "form": "form alone",
}
GRPO_SIZE = ("per_device_train_batch_size", "num_generations", "gradient_accumulation_steps")
PPO_SIZE = ("batch_size",)
SCALE = "135M parameters and 256 answers to sums"
OTHERS = {"PPO": "PPO after equally many answers", "form alone": "the same rewarded for any number, right or wrong"}
YUE, LIU = "Yue et al. 2025, arXiv:2504.13837, abstract", "Liu et al. 2025, arXiv:2503.20783, abstract"


def read(runs: Sequence[Run]) -> Report:
    """Reads accuracy, Maj@K and Pass@K of each held-out sum, before and after, and the gradient's variance."""
    check_equal(runs)
    groups = by(runs, "method")
    methods = {name: groups[method] for method, name in METHODS.items() if method in groups}
    most = runs[0].config["majority_of"]
    measured: dict[str, Numbers] = {}
    for name, group in methods.items():
        for when in ("", "_before"):
            known = [run for run in group if "right" + when in run.per_prompt]
            scores = {
                f"right{when}": lambda run, key=f"right{when}": run.per_prompt[key],
                f"maj@{most}{when}": lambda run, key=f"maj@{most}{when}": run.per_prompt[key],
                f"pass@{most}{when}": lambda run, when=when: passes(run, most, when),
                f"pass@{MOST}{when}": lambda run, when=when: passes(run, MOST, when),
            }
            for score, value in scores.items():
                if values := of_seeds(known, value):
                    measured[f"{score.replace('_', ' ')}, {name}"] = values
        if ratios := of_seeds([run for run in group if "variance/raw" in run.summary], variance_ratio):
            measured[f"variance ratio, {name}"] = ratios
    seeds = len(by(runs, "seed"))
    captions = {
        "figure": "(a) The reward in training: for form alone it is 1 for any number, and RFT learns from answers of "
        "the untrained model. (b) Right answers to held-out sums; each dot is one of "
        f"{seeds} seeds, and the line is their mean. (c) Pass@K of held-out sums before training and "
        "after it, in the colours of (a). (d) Maj@K of held-out sums before and after GRPO. Curves are medians of the "
        "seeds, bands go from the lower to the upper quartile."
    }
    samples = samples_of({name: group[0] for name, group in methods.items()})
    if shares := samples.get("right after"):
        samples["right after"] = [round(share, 3) for share in shares]
    claims = list(claims_about(most, first_numbers(runs[0])))
    return Report(measured, claims, {"figure": figure(methods, most)}, captions, samples)


def passes(run: Run, k: int, when: str = "") -> list[float]:
    """Pass@K of each sum."""
    return [pass_at(k, probability) for probability in run.per_prompt[f"right{when}"]]


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
    config = SumsConfig(largest=run.config["largest"], eval_prompts=run.config["eval_prompts"])
    prompts = sums(config, seed=0)[run.config["eval_split"]]["prompt"]
    return [prompt.splitlines()[-1].partition("+")[0] for prompt in prompts]


def answers(run: Run) -> int:
    """Returns the number of answers that each process of a run learns from."""
    return answers_of_step(run) * int(run.config["steps" if is_ppo(run) else "max_steps"])


def answers_of_step(run: Run) -> int:
    """Returns the number of answers that each process learns from in a step; PPO has one answer to a sum."""
    return prod(int(run.config[name]) for name in (PPO_SIZE if is_ppo(run) else GRPO_SIZE))


def is_ppo(run: Run) -> bool:
    """Whether ppo.py made the run."""
    return run.config["method"] == "ppo"


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
    yield Claim(
        f"GRPO raises Maj@{most}",
        (f"maj@{most}, GRPO", f"maj@{most} before, GRPO"),
        "more",
        place="section 5.2.2, figure 7",
        **shared,
    )
    yield Claim(
        f"GRPO leaves Pass@{most} as it is",
        (f"pass@{most}, GRPO", f"pass@{most} before, GRPO"),
        "little",
        place="section 5.2.2, figure 7",
        **shared,
    )
    yield Claim(
        f"GRPO lowers Pass@{MOST:,}, although it raises the accuracy",
        (f"pass@{MOST}, GRPO", f"pass@{MOST} before, GRPO"),
        "less",
        place=YUE,
        **shared,
    )
    for first, second in (("online RFT", "RFT"), ("GRPO", "online RFT")):
        yield Claim(
            f"{first} is more accurate than {second} after equally many answers",
            (f"right, {first}", f"right, {second}"),
            "more",
            place="section 5.2.1, figure 5",
            **shared,
        )
    yield Claim("Dr. GRPO is as accurate as GRPO", ("right, Dr. GRPO", "right, GRPO"), "little", place=LIU, **shared)
    for second in ("PPO", "form alone"):
        yield Claim(
            f"GRPO is more accurate than {OTHERS[second]}",
            ("right, GRPO", f"right, {second}"),
            "more",
            **shared | {"origin": "ours", "scale": ""},
        )
    yield Claim(
        "the group's mean lowers the variance of the policy gradient at the pretrained weights",
        ("variance ratio, GRPO",),
        "less",
        **margin_fields(PAPER, "variance"),
        origin="ours",
    )


def figure(methods: Mapping[str, Sequence[Run]], most: int) -> Figure:
    """Plots accuracy in training, accuracy after it, Pass@K, and Maj@K of GRPO."""
    held_out = "sums not trained on"
    plot, axes = panels(("in training", held_out, f"{held_out}: Pass@K", f"{held_out}: Maj@K, GRPO"))
    learning, after, passed, majority = axes
    curves(learning, {name: [_learning(run) for run in group] for name, group in methods.items()})
    learning.set_xlabel("answers learnt from")
    learning.set_ylabel("reward")
    _dots(after, methods)
    after.set_ylabel("share of right answers")
    whole = [run for run in methods.get("GRPO", []) if _knows(run)]
    if whole:  # the model before training is the same for all seeds
        passed.plot(*_over_k(whole[0], "pass", "_before", MOST), "k--", label="before training")
        majority.plot(*_over_k(whole[0], "maj", "_before", most), "k--", label="before training")
        curves(majority, {"GRPO": [_over_k(run, "maj", "", most) for run in whole]})
    curves(passed, {name: [_over_k(run, "pass", "", MOST) for run in group] for name, group in methods.items()})
    for axis in (passed, majority):
        axis.set_xlabel("K, answers to a sum")
        axis.set_ylabel("share of sums")
        axis.set_xscale("log", base=2)
    if whole:  # (a) names the others
        passed.legend(handles=passed.lines[:1], frameon=False, fontsize=9)
    return plot


def _learning(run: Run) -> tuple[list[float], list[float]]:
    steps, rewards = run.curve("step", "reward")
    return [step * answers_of_step(run) for step in steps], rewards


def _dots(axis: Axes, methods: Mapping[str, Sequence[Run]]) -> None:
    """Plots a dot for each run, and the mean of each method; first the accuracies before training."""
    columns = {"before": [run.summary["right_before"] for group in methods.values() for run in group if _knows(run)]}
    columns |= {name: [run.summary["right"] for run in group] for name, group in methods.items()}
    for i, (name, values) in enumerate((name, values) for name, values in columns.items() if values):
        axis.plot([name] * len(values), values, f"C{(i - 1) % 10}o" if i else "ko", alpha=0.6, markersize=4)
        axis.hlines(fmean(values), i - 0.2, i + 0.2, color="k")
    axis.tick_params(axis="x", labelrotation=30)
    axis.grid(alpha=0.3)


def _knows(run: Run) -> bool:
    return "right_before" in run.summary


def _over_k(run: Run, name: str, when: str, most: int) -> tuple[list[float], list[float]]:
    sizes = powers(most)
    return [float(size) for size in sizes], [run.summary[f"{name}@{size}{when}"] for size in sizes]


if __name__ == "__main__":
    main(TITLE, CLAIM, read)
