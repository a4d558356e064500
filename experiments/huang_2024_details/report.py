"""Judges what each detail of PPO changes: `python -m experiments.huang_2024_details.report FOLDER ...`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from matplotlib import pyplot as plt

from experiments.claims import Claim, Numbers
from experiments.huang_2024_details.details import DETAILS
from experiments.margins import margin_fields
from experiments.reports import Report, main, seeds_in_words, spread
from experiments.run_folders import Run, of_seeds
from experiments.samples import samples_of
from experiments.sentiment_ppo import EVAL_KL, EVAL_REWARD

PAPER = "huang_2024_details"
SCALE = "15M parameters"
TITLE = "The details of PPO, left out one by one"
CLAIM = (
    "Huang et al. 2024, arXiv:2403.17031, and the authors' write-up of 2023: some details of the implementation decide "
    "whether RLHF works, others hardly matter. Here each is changed alone, and compared with the recipe at equal KL."
)
EARLY = 3  # steps of PPO, which are 12 updates
Groups = Mapping[str, Mapping[int, Run]]  # setting -> seed -> run


@dataclass(frozen=True)
class Quantity:
    """What a claim about a detail compares with the recipe.

    Attributes:
        name: Its name.
        unit: Its unit.
        margin: Its name in margins.yaml.
        value: From a run of the changed setting and the recipe's run of the same seed, the value of the first.
    """

    name: str
    unit: str
    margin: str
    value: Callable[[Run, Run], float]


def at_equal_kl(run: Run, other: Run) -> float:
    """The reward of a run at the largest KL that both runs reached, interpolated between its evaluations."""
    reach = min(max(kl for kl, _ in looks(run)), max(kl for kl, _ in looks(other)))
    points = looks(run)
    for (low, before), (high, after) in pairwise(points):
        if low <= reach <= high:
            return before + (after - before) * (reach - low) / (high - low) if high > low else after
    return points[-1][1]


def looks(run: Run) -> list[tuple[float, float]]:
    """(KL, reward) of each evaluation, from the reference, whose KL is 0, to the end of training."""
    kls, rewards = run.curve(EVAL_KL, EVAL_REWARD)
    ends = [(0.0, run.summary["reward_before"]), (run.summary["kl"], run.summary["reward"])]
    return [ends[0], *zip(kls, rewards, strict=True), ends[1]]


REWARD = Quantity("reward at equal KL", "reward", "reward", at_equal_kl)
FINAL_KL = Quantity("KL at the end", "nats", "KL", lambda run, _: run.summary["kl"])
ENDED = Quantity("share of responses that ended", "share", "ended", lambda run, _: run.summary["ended"])
MOVED = Quantity(
    f"KL of an update to its policy, first {EARLY} steps",
    "nats per token",
    "KL of an update",
    lambda run, _: fmean(run.curve("step", "ppo/policy/policykl")[1][:EARLY]),
)
WRITE_UP = "the 2023 write-up, policy training"

# setting -> what changes, the quantity, the kind of claim, its origin, its place, the authors' words for the size
EXPECTED: dict[str, list[tuple[str, Quantity, str, str, str, str]]] = {
    "logprob_temperature=1.0": [
        (
            "log-probabilities at the wrong temperature: more KL",
            FINAL_KL,
            "more",
            "adapted",
            f"{WRITE_UP}, 1",
            "not stated",
        ),
        (
            "log-probabilities at the wrong temperature: less reward",
            REWARD,
            "less",
            "adapted",
            f"{WRITE_UP}, 1",
            "not stated",
        ),
    ],
    "adam_epsilon=1e-08": [
        (
            "Adam's epsilon 1e-8: larger early updates than 1e-5",
            MOVED,
            "more",
            "adapted",
            "the 2023 write-up, Adam",
            "",
        ),
    ],
    "missing_eos_penalty=None": [
        (
            "no penalty for a missing end: fewer responses end",
            ENDED,
            "less",
            "adapted",
            "section 7, EOS trick",
            "not stated",
        ),
    ],
    "whiten_advantages=False": [("advantages not whitened: less reward", REWARD, "less", "ours", "", "")],
    "whiten_rewards=True": [("rewards whitened: matters little", REWARD, "little", "ours", "", "")],
}
STABILITY: dict[str, tuple[str, Callable[[Sequence[float]], float]]] = {  # heading -> logged name, how to reduce it
    "largest mean ratio": ("ppo/policy/ratio", max),
    "ratios clipped": ("ppo/policy/clipfrac", fmean),
    "values clipped": ("ppo/val/clipfrac", fmean),
    "largest gradient": ("ppo/grad_norm", max),
    "variance explained, late": ("ppo/val/var_explained", lambda steps: fmean(steps[-max(1, len(steps) // 3) :])),
}


def read(runs: Sequence[Run]) -> Report:
    """Compares each setting with the recipe on held-out openings, seed by seed."""
    groups = by_setting(runs)
    measured: dict[str, Numbers] = {}
    claims: list[Claim] = []
    recipe = groups.get("recipe", {})
    if recipe:
        for name, key in (("reward before", "reward_before"), ("reward after", "reward")):
            measured[f"{name}, recipe"] = {seed: run.per_prompt[key] for seed, run in recipe.items()}
        claim = "the recipe: the reward rises"
        fields = margin_fields(PAPER, "reward") | {"trivial": "the reward is optimised", "scale": SCALE}
        claims.append(Claim(claim, ("reward after, recipe", "reward before, recipe"), "more", **fields))
    for setting, expected in EXPECTED.items():
        pairs = {seed: (run, recipe[seed]) for seed, run in groups.get(setting, {}).items() if seed in recipe}
        for text, quantity, kind, origin, place, number in expected if pairs else ():
            names = f"{quantity.name}, {setting}", f"{quantity.name}, recipe beside {setting}"
            measured[names[0]] = {seed: quantity.value(run, base) for seed, (run, base) in pairs.items()}
            measured[names[1]] = {seed: quantity.value(base, run) for seed, (run, base) in pairs.items()}
            fields = margin_fields(PAPER, quantity.margin) | {"scale": SCALE if origin == "adapted" else ""}
            claims.append(Claim(text, names, kind, **fields, origin=origin, place=place, number=number))
    firsts = {setting: next(iter(group.values())) for setting, group in groups.items()}
    seeds = seeds_in_words(len({run.config["seed"] for run in runs}))
    captions = {
        "figure": f"Differences to the recipe with the same seed; a dot is one of {seeds}, a bar their median.",
        "effects": f"Medians and ranges of {seeds}.",
    }
    figures = {"figure": figure(groups), "effects": effects_figure(groups)}
    return Report(measured, claims, figures, captions, samples_of(firsts))


def by_setting(runs: Sequence[Run]) -> Groups:
    """Groups runs by the details that they change, `name=value`, the recipe first; then by seed."""
    lists: dict[str, list[Run]] = {}
    for run in runs:
        changed = [f"{name}={run.config[name]}" for name, value in DETAILS.items() if run.config[name] != value]
        lists.setdefault(", ".join(changed) or "recipe", []).append(run)
    order = ["recipe", *EXPECTED]
    names = sorted(lists, key=lambda name: order.index(name) if name in order else len(order))
    return {name: of_seeds(lists[name], lambda run: run) for name in names}


def differences(groups: Groups, setting: str, quantity: Quantity) -> list[float]:
    """A quantity minus the recipe's with the same seed, for each seed that both have."""
    recipe = groups.get("recipe", {})
    return [
        quantity.value(run, recipe[seed]) - quantity.value(recipe[seed], run)
        for seed, run in groups[setting].items()
        if seed in recipe
    ]


# The table and the figures ---------------------------------------------------------------------------------------


def effects(groups: Groups) -> dict[str, list[str]]:
    """Returns the table of effects: heading -> a cell per setting. Differences are to the recipe with the same seed."""
    columns: dict[str, list[str]] = {"setting": list(groups)}
    for name, form in (("reward", ".2f"), ("kl", ".1f"), ("ended", ".2f")):
        columns[name] = [spread([run.summary[name] for run in group.values()], form) for group in groups.values()]
    gaps = [differences(groups, setting, REWARD) for setting in groups]
    columns["reward at equal KL, difference"] = [spread(seeds, "+.2f") if seeds else "" for seeds in gaps]
    for heading, (name, reduce) in STABILITY.items():
        steps = [[run.curve("step", name)[1] for run in group.values()] for group in groups.values()]
        columns[heading] = [f"{median(map(reduce, seeds)):.2f}" if all(seeds) else "" for seeds in steps]
    return columns


def figure(groups: Groups) -> plt.Figure:
    """Plots the differences to the recipe in reward at equal KL, KL, and ended responses; a dot is a seed."""
    changed = [setting for setting in groups if setting != "recipe"]
    panels = (REWARD, FINAL_KL, ENDED)
    plot, axes = plt.subplots(1, len(panels), figsize=(12, 1.4 + 0.4 * len(groups)), layout="constrained", sharey=True)
    for axis, quantity in zip(axes, panels, strict=True):
        for row, setting in enumerate(changed):
            if seeds := differences(groups, setting, quantity):
                axis.scatter(seeds, [row] * len(seeds), s=22, alpha=0.7, color=f"C{row % 10}")
                axis.scatter(median(seeds), row, s=260, marker="|", color=f"C{row % 10}", linewidth=2)
        axis.axvline(0, color="tab:gray", linewidth=0.8)
        axis.set_title(quantity.name, fontsize=10)
        axis.set_xlabel(f"difference to the recipe ({quantity.unit})")
        axis.grid(alpha=0.3)
    axes[0].set_yticks(range(len(changed)), changed)
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
    return plot


if __name__ == "__main__":
    main(TITLE, CLAIM, read)
