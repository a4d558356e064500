"""Judges PPO and best-of-n against fine-tuning: `python -m experiments.stiennon_2020_summarize.report FOLDER ...`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib import pyplot as plt

from experiments.claims import Claim, Numbers
from experiments.figures import Curve, curves, panels
from experiments.margins import margin_fields
from experiments.reports import Report, main, medians_in_words, seeds_in_words
from experiments.run_folders import Run, of_seeds
from experiments.samples import SAMPLES

PAPER = "stiennon_2020_summarize"
TITLE = "Fine-tuning, a reward model of comparisons, PPO and best-of-n"
CLAIM = (
    "Stiennon et al. 2020, arXiv:2009.01325: PPO and best-of-n against a reward model beat fine-tuning in the eyes of "
    "those who made its comparisons; with a smaller KL penalty the reward model's score rises further while their "
    "judgement falls; and a reward model becomes more accurate with more judgements and with more parameters."
)
SFT, PPO, BEST_OF, JUDGED = "sft", "ppo_", "best_of_", "judged_"
LONGER = "judged_longer"
SIZES = {"stories15m": 15, "minilm": 23, "smollm2": 135}  # millions of parameters
SCALE = "15M parameters, and an encoder's score that judges continuations of story openings"
HEAD = "a linear head on a frozen model of 15M to 135M parameters"


def read(runs: Sequence[Run]) -> Report:
    """Reads gold of each policy for each held-out prompt, the proxy, and heads' accuracies for each instruction.

    The former are from runs of train.py, the latter from runs of judgements.py; either may be missing.

    Raises:
        ValueError: No run has results of the pipeline or of heads.
    """
    whole = [run for run in runs if f"gold_{SFT}" in run.per_prompt]
    judging = [run for run in runs if run not in whole and LONGER in run.per_prompt]
    if not whole and not judging:
        raise ValueError(
            f"none of the {len(runs)} runs has gold_{SFT} or {LONGER} among its numbers per prompt: a run of train.py "
            "or judgements.py is needed. Give the folder of one."
        )
    measured: dict[str, Numbers] = {}
    claims: list[Claim] = []
    figures: dict[str, plt.Figure] = {}
    if whole:
        policies = [name.removeprefix("gold_") for name in whole[0].per_prompt if name.startswith("gold_")]
        for name in policies:
            measured[gold(name)] = of_seeds(whole, lambda run, key=f"gold_{name}": run.per_prompt[key])
            measured[proxy(name)] = of_seeds(whole, lambda run, key=f"proxy_{name}": run.summary[key])
        claims += claims_about_policies(policies)
        figures |= {"figure": figure(whole, policies), "training": training(whole)}
    if judging:
        heads = [name for name in judging[0].per_prompt if name.startswith(JUDGED) and name != LONGER]
        models = list(dict.fromkeys(model_of(head) for head in heads))
        for model in models:
            names = [head for head in heads if model_of(head) == model]
            most = max(names, key=number)
            measured[accuracy(model)] = of_seeds(judging, lambda run, key=most: run.per_prompt[key])
            if len(names) > 1:
                measured[growth(model)] = of_seeds(judging, lambda run, of=names: slope(run, of))
        claims += claims_about_heads([model for model in models if growth(model) in measured])
        figures["judgements"] = by_data(judging, heads)
    captions = {
        name: CAPTIONS[name].format(**words_about(judging if name == "judgements" else whole)) for name in figures
    }
    return Report(measured, claims, figures, captions, samples(whole[0]) if whole else {})


def words_about(runs: Sequence[Run]) -> dict[str, str]:
    """What a caption says about the runs."""
    return {
        "seeds": seeds_in_words(len(runs)),
        "medians": medians_in_words(len(runs)),
        "instructions": str(len(runs[0].per_prompt.get(LONGER, ()))),
    }


CAPTIONS = {
    "figure": (
        "Gold (the labeller's score) and the reward model's score of held-out prompts over the KL, a dot for each "
        "policy and seed, {seeds}. Dashed: gold of the books' own sentences."
    ),
    "training": "Over the steps of PPO: {medians}.",
    "judgements": (
        "Accuracy of linear heads on real judgements, the mean over {instructions} held-out instructions, over the "
        "number of judgements that a head learnt from: {medians}. Dashed: preferring the longer answer; dotted: the "
        "paper's 1.1 points for each doubling, from the first model's start."
    ),
}


def gold(policy: str) -> str:
    """The name of a policy's gold score."""
    return f"gold, {policy}"


def proxy(policy: str) -> str:
    """The name of a policy's score by the reward model."""
    return f"reward model's score, {policy}"


def accuracy(model: str) -> str:
    """The name of the accuracy with the most judgements."""
    return f"accuracy on real judgements, {model}"


def growth(model: str) -> str:
    """The name of the gain of accuracy for each doubling of the judgements."""
    return f"accuracy for each doubling, {model}"


def number(name: str) -> int:
    """The count at the end of a name."""
    return int(name.rpartition("_")[2])


def coefficient(policy: str) -> float:
    """The KL coefficient of a policy of PPO."""
    return float(policy.removeprefix(PPO))


def judged(model: str, count: int) -> str:
    """The name of the accuracy of a head on the model that learnt from `count` judgements."""
    return f"{JUDGED}{Path(model).name}_{count}"


def model_of(head: str) -> str:
    """The model of a head."""
    return head.removeprefix(JUDGED).rpartition("_")[0]


def slope(run: Run, heads: Sequence[str]) -> list[float]:
    """The slope of accuracy over log2 of the number of judgements, for each instruction."""
    table = np.asarray([run.per_prompt[head] for head in heads])
    return np.polyfit(np.log2([number(head) for head in heads]), table, 1)[0].tolist()


def claims_about_policies(policies: Sequence[str]) -> Iterator[Claim]:
    """The paper's claims for these policies."""
    trained = sorted((name for name in policies if name.startswith(PPO)), key=coefficient)
    best = max((name for name in policies if name.startswith(BEST_OF)), key=number)
    middle = trained[len(trained) // 2]
    yield Claim(
        f"PPO (coefficient {coefficient(middle):g}) beats fine-tuning by the labeller's score",
        (gold(middle), gold(SFT)),
        "more",
        **margin_fields(PAPER, "gold"),
        scale=SCALE,
        place="section 4.1, figure 1",
        number="61% against 43% preferred to the reference (1.3B; supervised, ten times the size)",
    )
    yield Claim(
        f"the best of {number(best)} beats fine-tuning by the labeller's score",
        (gold(best), gold(SFT)),
        "more",
        **margin_fields(PAPER, "gold"),
        scale=SCALE,
        place="figure 7",
    )
    if trained[0] != middle:
        yield Claim(
            f"a smaller coefficient ({coefficient(trained[0]):g}) buys a higher score of the reward model than "
            f"{coefficient(middle):g}",
            (proxy(trained[0]), proxy(middle)),
            "more",
            **margin_fields(PAPER, "score"),
            scale=SCALE,
            place="figure 5",
        )
        yield Claim(
            f"the smaller coefficient ({coefficient(trained[0]):g}) lowers the labeller's score",
            (gold(trained[0]), gold(middle)),
            "less",
            **margin_fields(PAPER, "gold"),
            scale=SCALE,
            place="figure 5",
        )


def claims_about_heads(models: Sequence[str]) -> Iterator[Claim]:
    """The paper's claims about reward models, for heads on these models."""
    for model in models:
        yield Claim(
            f"real judgements, head on {model}: accuracy rises with each doubling of the data",
            (growth(model),),
            "more",
            **margin_fields(PAPER, "accuracy by data"),
            scale=HEAD,
            place="figure 6",
            number="1.1 points per doubling",
        )
    sized = sorted((model for model in models if model in SIZES), key=SIZES.__getitem__)
    if len(sized) > 1:
        yield Claim(
            f"real judgements: a head on {sized[-1]} is more accurate than one on {sized[0]}",
            (accuracy(sized[-1]), accuracy(sized[0])),
            "more",
            **margin_fields(PAPER, "accuracy by size"),
            scale=HEAD,
            place="figure 6",
            number="1.8 points per doubling of the size",
        )


def figure(runs: Sequence[Run], policies: Sequence[str]) -> plt.Figure:
    """Plots gold and proxy over the KL to the fine-tuned policy."""
    plot, (axis,) = panels(("held-out prompts",), height=4)
    ranks = [SFT, *sorted((name for name in policies if name.startswith(BEST_OF)), key=number)]
    trained = sorted((name for name in policies if name.startswith(PPO)), key=coefficient)
    for label, names, color in (("best of n", ranks, "C0"), ("PPO", trained, "C1")):
        for kind, marker in (("gold", "o"), ("proxy", "x")):
            xs = [run.summary[f"kl_{name}"] for run in runs for name in names]
            ys = [run.summary[f"{kind}_{name}"] for run in runs for name in names]
            axis.scatter(xs, ys, s=14, marker=marker, color=color, alpha=0.7, label=f"{label}: {kind}")
    axis.axhline(fmean(run.summary["gold_reference"] for run in runs), color="tab:gray", linestyle="--", linewidth=0.8)
    axis.set(xlabel="KL to the fine-tuned policy (nats per answer)", ylabel="score")
    axis.set_xscale("symlog", linthresh=1.0)
    axis.set_xlim(left=-0.3)
    axis.set_xticks([0, 1, 3, 10, 30, 100], ["0", "1", "3", "10", "30", "100"])
    axis.legend(frameon=False, fontsize=9, loc="upper left")
    axis.grid(alpha=0.3)
    return plot


def by_data(runs: Sequence[Run], heads: Sequence[str]) -> plt.Figure:
    """Plots accuracy on real judgements over their number, for each model."""
    plot, (axis,) = panels(("real judgements",), height=4)
    lines: dict[str, list[Curve]] = {
        model: [by_number(run, [head for head in heads if model_of(head) == model]) for run in runs]
        for model in dict.fromkeys(map(model_of, heads))
    }
    curves(axis, lines)
    axis.axhline(fmean(runs[0].per_prompt[LONGER]), color="tab:gray", linestyle="--", linewidth=0.8)
    xs, ys = zip(*next(iter(lines.values())), strict=True)
    start = fmean(row[0] for row in ys)
    axis.plot(xs[0], [start + 0.011 * np.log2(x / xs[0][0]) for x in xs[0]], ":", color="tab:gray", label="paper")
    axis.legend(frameon=False, fontsize=9, loc="lower right")
    axis.set(xlabel="judgements learnt from", ylabel="accuracy")
    axis.set_xscale("log", base=2)
    axis.set_xticks(list(xs[0]), [f"{x:g}" for x in xs[0]])
    return plot


def by_number(run: Run, heads: Sequence[str]) -> Curve:
    """Numbers of judgements and accuracies of a run."""
    return [float(number(head)) for head in heads], [fmean(run.per_prompt[head]) for head in heads]


def training(runs: Sequence[Run]) -> plt.Figure:
    """Plots PPO's reward, gold score and KL over its steps, for each coefficient."""
    shown = {"ppo/mean_scores": "reward model's score", "ppo/gold": "gold score", "objective/kl": "KL (nats)"}
    plot, axes = panels([*shown.values()])
    coefficients = sorted({row["ppo/coefficient"] for row in runs[0].history if "ppo/coefficient" in row})
    for axis, key in zip(axes, shown, strict=True):
        curves(axis, {f"coefficient {value:g}": [steps(run, key, value) for run in runs] for value in coefficients})
        axis.set_xlabel("PPO step")
    return plot


def steps(run: Run, key: str, coefficient: float) -> Curve:
    """A logged number over PPO's steps; where a resumed run repeated a step, its later value."""
    rows = [row for row in run.history if row.get("ppo/coefficient") == coefficient]
    values = {row["ppo/step"]: row[key] for row in rows}
    return sorted(values), [values[step] for step in sorted(values)]


def samples(run: Run) -> Mapping[str, Sequence[object]]:
    """Reads a run's samples: prompts with the answer of each policy, and scores with two decimals."""
    file = run.folder / SAMPLES
    columns = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {
        heading: [f"{cell:.2f}" if isinstance(cell, float) else cell for cell in cells]
        for heading, cells in columns.items()
    }


if __name__ == "__main__":
    main(TITLE, CLAIM, read)
