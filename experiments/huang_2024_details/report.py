"""Judges what each detail of PPO changes: `python -m experiments.huang_2024_details.report FOLDER ...`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from matplotlib import pyplot as plt

from experiments.figures import Verdict
from experiments.huang_2024_details.details import DETAILS, UNCLIPPED
from experiments.reports import Report, main, spread
from experiments.runs import Run
from experiments.sentiment_ppo import samples_of

TITLE = "The details of PPO, left out one by one"
CLAIM = (
    "Huang et al. 2024, arXiv:2403.17031: some details of the implementation decide whether RLHF works, others hardly "
    "matter. Here each is changed alone, and compared with the recipe seed by seed."
)
MARGIN = 0.1  # of reward: twice the standard error of the median of three differences over 64 responses
Groups = Mapping[str, Mapping[int, Run]]  # setting -> seed -> run


@dataclass(frozen=True)
class Rule:
    """A condition on the differences to the recipe, one per seed."""

    words: str
    holds: Callable[[Sequence[float]], bool]


BELOW = Rule("below 0 in every seed", lambda gaps: max(gaps) < 0)
ABOVE = Rule("above 0 in every seed", lambda gaps: min(gaps) > 0)
LITTLE = Rule(f"median within {MARGIN} of 0", lambda gaps: abs(median(gaps)) <= MARGIN)
NO_GAIN = Rule(f"median at most {MARGIN}", lambda gaps: median(gaps) <= MARGIN)

EXPECTED = {  # setting -> claim, number of the summary, rule; fixed before the first run
    "whiten_advantages=False": ("advantages not whitened: less reward", "reward", BELOW),
    "whiten_rewards=True": ("rewards whitened: matters little", "reward", LITTLE),
    f"cliprange_value={UNCLIPPED}": ("values not clipped: matters little", "reward", LITTLE),
    "adam_epsilon=1e-08": ("Adam's epsilon 1e-8: no better than 1e-5", "reward", NO_GAIN),
    "missing_eos_penalty=None": ("no penalty for a missing end: fewer responses end", "ended", BELOW),
    "logprob_temperature=1.0": ("log-probabilities at the wrong temperature: less reward", "reward", BELOW),
    "use_score_scaling=True": ("scores divided by their deviation: more KL", "kl", ABOVE),
}
STABILITY = {  # heading -> logged name, and how to reduce its steps
    "largest mean ratio": ("ppo/policy/ratio", max),
    "ratios clipped": ("ppo/policy/clipfrac", fmean),
    "values clipped": ("ppo/val/clipfrac", fmean),
    "largest gradient": ("ppo/grad_norm", max),
    "late value error": ("ppo/val/error", lambda steps: fmean(steps[-max(1, len(steps) // 3) :])),
}


def judge(runs: Sequence[Run]) -> Report:
    """Compares each setting with the recipe on held-out openings."""
    groups = by_setting(runs)
    verdicts = [rises(groups["recipe"])] if "recipe" in groups else []
    for setting, (claim, name, rule) in EXPECTED.items():
        if gaps := differences(groups, setting, name):
            verdicts.append(Verdict(claim, f"{name}, {rule.words}", spread(gaps, "+.3f"), rule.holds(gaps)))
    firsts = {setting: next(iter(group.values())) for setting, group in groups.items()}
    return Report(verdicts, {"figure": figure(groups), "effects": effects_figure(groups)}, samples_of(firsts))


def by_setting(runs: Sequence[Run]) -> Groups:
    """Groups runs by the details that they change, `name=value`, the recipe first; then by seed."""
    groups: dict[str, dict[int, Run]] = {}
    for run in runs:
        changed = [f"{name}={run.config[name]}" for name, value in DETAILS.items() if run.config[name] != value]
        group = groups.setdefault(", ".join(changed) or "recipe", {})
        if run.config["seed"] in group:
            raise ValueError(
                f"{run.folder} has the seed and the details of {group[run.config['seed']].folder}; one run of each is "
                "needed. Give the folder of one sweep."
            )
        group[run.config["seed"]] = run
    order = ["recipe", *EXPECTED]
    return dict(sorted(groups.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def rises(recipe: Mapping[int, Run]) -> Verdict:
    """Judges whether the reward of held-out openings is higher after training, in each seed."""
    before, after = ([run.summary[key] for run in recipe.values()] for key in ("reward_before", "reward"))
    passed = all(last > first for first, last in zip(before, after, strict=True))
    return Verdict("the recipe: the reward rises", f"above {spread(before)}", spread(after), passed)


def differences(groups: Groups, setting: str, name: str) -> list[float]:
    """Returns a number of the summary minus the recipe's with the same seed, for each seed that both have."""
    recipe = groups.get("recipe", {})
    return [
        run.summary[name] - recipe[seed].summary[name]
        for seed, run in groups.get(setting, {}).items()
        if seed in recipe
    ]


# The table and the figures ---------------------------------------------------------------------------------------


def effects(groups: Groups) -> dict[str, list[str]]:
    """Returns the table of effects: heading -> a cell per setting. Differences are to the recipe with the same seed."""
    columns: dict[str, list[str]] = {"setting": list(groups)}
    for name, form in (("reward", ".2f"), ("kl", ".1f"), ("ended", ".2f")):
        columns[name] = [spread((run.summary[name] for run in group.values()), form) for group in groups.values()]
        gaps = [differences(groups, setting, name) for setting in groups]
        columns[f"{name}, difference"] = [spread(seeds, f"+{form}") if seeds else "" for seeds in gaps]
    for heading, (name, summed) in STABILITY.items():
        steps = [[run.curve("step", name)[1] for run in group.values()] for group in groups.values()]
        columns[heading] = [f"{median(map(summed, seeds)):.2f}" if all(seeds) else "" for seeds in steps]
    return columns


def figure(groups: Groups) -> plt.Figure:
    """Plots for each detail the difference in reward, the KL, and the share of ended responses; a dot is a seed."""
    panels = {
        "reward: difference to the recipe": lambda setting: differences(groups, setting, "reward"),
        "KL to the pretrained model, nats": lambda setting: [run.summary["kl"] for run in groups[setting].values()],
        "responses that ended, share": lambda setting: [run.summary["ended"] for run in groups[setting].values()],
    }
    plot, axes = plt.subplots(1, len(panels), figsize=(12, 1.4 + 0.4 * len(groups)), layout="constrained", sharey=True)
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        for row, setting in enumerate(groups):
            if seeds := values(setting):
                axis.scatter(seeds, [row] * len(seeds), s=22, alpha=0.7, color=f"C{row % 10}")
                axis.scatter(median(seeds), row, s=260, marker="|", color=f"C{row % 10}", linewidth=2)
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].axvline(0, color="tab:gray", linewidth=0.8)
    axes[0].set_yticks(range(len(groups)), list(groups))
    axes[0].invert_yaxis()
    return plot


def effects_figure(groups: Groups) -> plt.Figure:
    """Renders the table of effects as a figure."""
    columns = effects(groups)
    plot, axis = plt.subplots(figsize=(17, 0.7 + 0.3 * len(groups)), layout="constrained")
    axis.axis("off")
    table = axis.table(list(zip(*columns.values(), strict=True)), colLabels=list(columns), loc="center")
    table.auto_set_font_size(False)
    table.set_fontsize(8)
    table.auto_set_column_width(range(len(columns)))
    table.scale(1, 1.3)
    axis.set_title("Median and range of the seeds; differences are to the recipe with the same seed", fontsize=10)
    return plot


if __name__ == "__main__":
    main(TITLE, CLAIM, judge)
