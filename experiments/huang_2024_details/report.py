"""Judges what each detail of PPO changes: `python -m experiments.huang_2024_details.report FOLDER ...`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal

from matplotlib import pyplot as plt

from experiments.claims import Claim, Numbers
from experiments.figures import panels
from experiments.huang_2024_details.details import DETAILS
from experiments.margins import margin_fields
from experiments.reports import Report, main, seeds_in_words
from experiments.run_folders import Run, of_seeds, setting_of
from experiments.samples import samples_of
from experiments.sentiment_ppo import EVAL_KL, EVAL_REWARD
from experiments.statistics import sample_of

PAPER = "huang_2024_details"
SCALE = "15M parameters"
TITLE = "The details of PPO, left out one by one"
CLAIM = (
    "Huang et al. 2024, arXiv:2403.17031, and the authors' write-up of 2023: some details of the implementation decide "
    "whether RLHF works, others hardly matter. Here each is changed alone, and compared with the recipe at equal KL."
)
EARLY = 3  # steps of PPO, which are 12 updates
Kind = Literal["more", "less", "little"]
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


REWARD = Quantity("reward at equal KL", "reward", "reward at equal KL", at_equal_kl)
FINAL_KL = Quantity("KL at the end", "nats", "KL", lambda run, _: run.summary["kl"])
ENDED = Quantity("share of responses that ended", "share", "ended", lambda run, _: run.summary["ended"])
MOVED = Quantity(
    f"KL of an update to its policy, first {EARLY} steps",
    "nats per token",
    "KL of an update",
    lambda run, _: fmean(run.curve("step", "ppo/policy/policykl")[1][:EARLY]),
)
WRITE_UP = "the 2023 write-up, policy training"


# setting -> its words
WORDS = {
    "whiten_advantages=False": "advantages not whitened",
    "whiten_rewards=True": "rewards whitened",
    "random_value_head=True": "value head starts from random weights",
    "cliprange_value=1000.0": "values not clipped",
    "value_learning_rate=0.0003": "value head learns ten times as fast",
    "kl_in_loss=True": "KL in the loss (k3)",
    "kl_penalty=mse": "KL by k2 in place of k1",
    "kl_penalty=k3": "KL by k3 in place of k1",
    "adam_epsilon=1e-08": "Adam's epsilon 1e-8 in place of 1e-5",
    "anneal_learning_rate=True": "learning rate falls to 0",
    "logprob_temperature=1.0": "log-probabilities at the wrong temperature",
    "missing_eos_penalty=None": "no penalty for a missing end",
    "ppo_epochs=4": "four epochs in place of two",
    "batch_size=128": "batch four times as large",
    "dropout=0.1": "dropout 0.1 in the updates",
    "reference_decay=0.9": "reference follows the policy",
}

# setting -> for each effect that the authors state: its name, the quantity, the kind of claim, its place, its size
STATED: dict[str, list[tuple[str, Quantity, Kind, str, str]]] = {
    "logprob_temperature=1.0": [
        ("more KL", FINAL_KL, "more", f"{WRITE_UP}, 1", "not stated"),
        ("less reward at equal KL", REWARD, "less", f"{WRITE_UP}, 1", "not stated"),
    ],
    "adam_epsilon=1e-08": [("larger early updates", MOVED, "more", "the 2023 write-up, Adam", "")],
    "missing_eos_penalty=None": [("fewer responses end", ENDED, "less", "section 7, EOS trick", "not stated")],
}

# setting -> why it cannot change a run
IDLE = {"cliprange_value=1000.0": "the clip never acts at this size: no value of any step was clipped"}


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
    for setting, words in WORDS.items():
        pairs = {seed: (run, recipe[seed]) for seed, run in groups.get(setting, {}).items() if seed in recipe}
        for effect, quantity, kind, fields in expected(setting) if pairs else ():
            names = f"{quantity.name}, {setting}", f"{quantity.name}, recipe beside {setting}"
            measured[names[0]] = {seed: quantity.value(run, base) for seed, (run, base) in pairs.items()}
            measured[names[1]] = {seed: quantity.value(base, run) for seed, (run, base) in pairs.items()}
            claims.append(Claim(f"{words}: {effect}", names, kind, **margin_fields(PAPER, quantity.margin), **fields))
    firsts = {setting: next(iter(group.values())) for setting, group in groups.items()}
    seeds = seeds_in_words(len({run.config["seed"] for run in runs}))
    captions = {
        "figure": f"Means of {seeds} and their 95% intervals, before the correction for the number of details. Between "
        "the dotted lines an effect does not matter."
    }
    return Report(measured, claims, {"figure": figure(groups)}, captions, samples_of(firsts))


def expected(setting: str) -> Iterator[tuple[str, Quantity, Kind, dict[str, Any]]]:
    """The effects by which a setting is judged: in words, the quantity, the kind and the origin of the claim."""
    stated = STATED.get(setting, [])
    for effect, quantity, kind, place, number in stated:
        yield effect, quantity, kind, {"origin": "adapted", "place": place, "number": number, "scale": SCALE}
    if all(quantity.name != REWARD.name for _, quantity, *_ in stated):
        fields = {"origin": "ours", "trivial": IDLE.get(setting, "")}
        yield "the reward at equal KL hardly changes", REWARD, "little", fields


def by_setting(runs: Sequence[Run]) -> Groups:
    """Groups runs by the details that they change, `name=value`, the recipe first; then by seed."""
    lists: dict[str, list[Run]] = {}
    for run in runs:
        changed = [f"{name}={run.config[name]}" for name, value in DETAILS.items() if setting_of(run, name) != value]
        lists.setdefault(", ".join(changed) or "recipe", []).append(run)
    order = ["recipe", *WORDS]
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


# The figure -------------------------------------------------------------------------------------------------------


def figure(groups: Groups) -> plt.Figure:
    """Plots what each change does to the reward at equal KL and to the KL at the end: mean, interval and each seed."""
    rows = [setting for setting in groups if setting != "recipe" and differences(groups, setting, REWARD)]
    quantities = REWARD, FINAL_KL
    height = 1.2 + 0.27 * max(len(rows), 2)
    plot, axes = panels([quantity.name for quantity in quantities], height=height, sharey=True)
    for axis, quantity in zip(axes, quantities, strict=True):
        for row, setting in enumerate(rows):
            seeds = differences(groups, setting, quantity)
            axis.scatter(seeds, [row] * len(seeds), s=8, alpha=0.4, color="tab:gray", linewidth=0)
            low, high = sample_of(seeds).interval() if len(seeds) > 1 else (seeds[0], seeds[0])
            axis.plot([low, high], [row, row], color="C0", linewidth=2)
            axis.scatter(fmean(seeds), row, s=24, color="C0", zorder=3)
        axis.axvline(0, color="black", linewidth=0.8)
        for edge in (-1, 1):
            axis.axvline(
                edge * margin_fields(PAPER, quantity.margin)["matters"], color="C3", linewidth=0.8, linestyle=":"
            )
        axis.set_xlabel(f"minus the recipe's ({quantity.unit})")
        axis.grid(alpha=0.3)
    axes[0].set_yticks(range(len(rows)), [WORDS.get(setting, setting) for setting in rows])
    axes[0].invert_yaxis()
    return plot


if __name__ == "__main__":
    main(TITLE, CLAIM, read)
