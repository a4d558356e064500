"""Judges the reward and the KL of PPO: `python -m experiments.ziegler_2019_sentiment.report FOLDER ...`."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from matplotlib import pyplot as plt

from experiments.claims import Claim, Numbers
from experiments.figures import curves, panels
from experiments.frontier import Frontier, reference_curves
from experiments.margins import margin_fields
from experiments.reports import Report, main, medians_in_words
from experiments.run_folders import Run, by, of_seeds
from experiments.samples import samples_of
from experiments.sentiment_ppo import KL, REWARD

PAPER = "ziegler_2019_sentiment"
TITLE = "PPO with an adaptive KL coefficient on the sentiment of continuations"
CLAIM = (
    "Ziegler et al. 2019, arXiv:1909.08593: the reward rises, the controller holds the KL to the pretrained model at "
    "its target, and more KL buys more reward."
)
PANELS = {
    REWARD: "reward (VADER, -1 to 1)",
    KL: "KL to the pretrained model (nats per response)",
    "objective/kl_coef": "coefficient of the KL",
}
SCALE = "15M parameters and a word list as the reward"
OPTIMISED = "the reward is optimised"


def read(runs: Sequence[Run]) -> Report:
    """Reads for each target the reward of held-out openings and the KL of the last third of the steps."""
    true = [run for run in runs if is_true(run)]
    targets = by([run for run in true if run.config["adap_kl_ctrl"]], "target")
    fixed = by([run for run in true if not run.config["adap_kl_ctrl"]], "init_kl_coef")
    learnt = by([run for run in runs if not is_true(run)], "target", "labels")
    groups = {f"target {value:g}": group for value, group in targets.items()}
    groups |= {f"coefficient {value:g}": group for value, group in fixed.items()}
    groups |= {name_of(*at): group for at, group in learnt.items()}
    measured: dict[str, Numbers] = {}
    for name, group in groups.items():
        measured[f"reward before, {name}"] = of_seeds(group, lambda run: run.per_prompt["reward_before"])
        measured[f"reward, {name}"] = of_seeds(group, lambda run: run.per_prompt["reward"])
        measured[f"KL, {name}"] = of_seeds(group, lambda run: run.summary["kl_held"])
    for target, group in targets.items():
        measured[distance(target)] = of_seeds(group, lambda run, at=target: run.summary["kl_held"] / at - 1)
    for at, group in learnt.items():
        measured[f"accuracy, {name_of(*at)}"] = of_seeds(group, lambda run: run.summary["choice_accuracy"])
    attainable = reference_curves(runs).get("attainable")
    if attainable is not None:
        for name, group in groups.items():
            shares = {seed: share_of(run, attainable) for seed, run in of_seeds(group, lambda run: run).items()}
            if None not in shares.values():
                measured[f"efficiency, {name}"] = {seed: share for seed, share in shares.items() if share is not None}
    samples = samples_of({name: group[0] for name, group in groups.items()})
    is_single = len(runs) == 1
    ends = "before and after training" if is_single else "after training, a dot for each run"
    caption = (
        f"Reward, KL and its coefficient over the steps of PPO: {medians_in_words(len(by(runs, 'seed')))}."
        f"{' Dashed: the targets.' if targets else ''} (d) Reward and KL of held-out openings {ends}; its legend "
        "is that of all panels"
    )
    if attainable is not None:
        caption += (
            "; black: the best reward reachable at each KL, estimated by samples that follow the optimal policies"
        )
    caption += "."
    if learnt:
        caption += " (a) Without the runs that learn from another reward."
    claims = [*claims_about(list(groups), list(targets)), *claims_about_labels(list(learnt), list(targets))]
    figures = {"figure": figure(groups, list(targets), attainable)}
    return Report(measured, claims, figures, {"figure": caption}, samples, outcome_of(runs[0]) if is_single else ())


def outcome_of(run: Run) -> list[str]:
    """What a run reached, in lines: the reward and the KL."""
    before, after, kl = (run.summary[name] for name in ("reward_before", "reward", "kl_held"))
    target = run.config["target"]
    words = f", target {target:g} ({kl / target - 1:+.0%})" if run.config["adap_kl_ctrl"] else ""
    return [
        f"reward on unseen openings {before:.3f} -> {after:.3f} ({after - before:+.3f})",
        f"KL {kl:.2f} nats per response{words}",
    ]


def share_of(run: Run, attainable: Frontier) -> float | None:
    """The run's gain of reward over the attainable gain at its KL; None if that is beyond the frontier's range."""
    after, before = (fmean(run.per_prompt[name]) for name in ("reward", "reward_before"))
    return attainable.efficiency(run.summary["kl"], after - before)


def is_true(run: Run) -> bool:
    """Whether the run's reward is the true one, and not learnt from labels."""
    return not run.config.get("labels", 0)


def name_of(target: float, labels: int) -> str:
    """The name of the runs that learn their reward from labels."""
    return f"target {target:g} with {labels} labels"


def distance(target: float) -> str:
    """The name of a run's distance from its target."""
    return f"KL over target {target:g}, less 1"


def claims_about(groups: Sequence[str], targets: Sequence[float]) -> Iterator[Claim]:
    """The paper's claims for these settings and targets, the targets ascending."""
    for name in groups:
        text = f"{name}: the reward of other books' openings rises"
        trivial = "" if "labels" in name else OPTIMISED
        yield more_reward(text, f"reward, {name}", f"reward before, {name}", place="section 3.1.1", trivial=trivial)
    band = margin_fields(PAPER, "KL")
    for target in targets:  # ours, because the paper's controller has no gain (kl_gain)
        text = f"target {target:g}: a controller with a gain holds the KL within {band['matters']:.0%}"
        yield Claim(text, (distance(target),), "little", **band, origin="ours")
    for name in groups:
        yield Claim(
            f"{name}: PPO gets more than half of the gain that is attainable at its KL",
            (f"efficiency, {name}",),
            "more",
            **margin_fields(PAPER, "efficiency"),
            origin="ours",
            than=0.5,
        )
    for low, high in pairwise(targets):
        text = f"target {high:g} gives more reward than {low:g}"
        names = f"reward, target {high:g}", f"reward, target {low:g}"
        yield more_reward(text, *names, place="figure 3", trivial="more KL is allowed, and the reward is optimised")


def claims_about_labels(learnt: Sequence[tuple[float, int]], targets: Sequence[float]) -> Iterator[Claim]:
    """The claims about learnt rewards: more labels give more of the true reward, and the true reward gives most."""
    for target in dict.fromkeys(target for target, _ in learnt):
        names = [name_of(*at) for at in learnt if at[0] == target] + [f"target {target:g}"] * (target in targets)
        for fewer, more in pairwise(names):
            text = f"{more} gives more reward than {fewer}"
            yield more_reward(text, f"reward, {more}", f"reward, {fewer}", place="section 3.1.1")


def more_reward(text: str, higher: str, lower: str, *, place: str, trivial: str = "") -> Claim:
    """The claim that the first of two measured rewards is the higher one."""
    fields = margin_fields(PAPER, "reward")
    return Claim(text, (higher, lower), "more", **fields, place=place, trivial=trivial, scale=SCALE)


def figure(groups: Mapping[str, Sequence[Run]], targets: Sequence[float], attainable: Frontier | None) -> plt.Figure:
    """Plots reward, KL and its coefficient over the steps, the targets as dashed lines, and the end of each run."""
    is_single = sum(map(len, groups.values())) == 1
    when = "before and after" if is_single else "after"
    plot, (*axes, ends) = panels([*PANELS.values(), f"held-out openings, {when} training"])
    for axis, key in zip(axes, PANELS, strict=True):
        is_shown = {name: key != REWARD or is_true(group[0]) for name, group in groups.items()}
        shown = {name: group for name, group in groups.items() if is_shown[name]} or groups
        curves(axis, {name: [run.curve("step", key) for run in group] for name, group in shown.items()})
        axis.get_legend().remove()  # that of the last panel has all names
        axis.set_xlabel("PPO step")
    for target in targets:
        axes[1].axhline(target, color="tab:gray", linestyle="--", linewidth=0.8)
    for name, group in groups.items():
        kls, rewards = ([run.summary[key] for run in group] for key in ("kl", "reward"))
        if is_single:
            ends.plot([0, *kls], [group[0].summary["reward_before"], *rewards], marker="o", markersize=4, label=name)
        else:
            ends.scatter(kls, rewards, s=18, label=name)
    if attainable is not None:
        ends.plot(attainable.kls, attainable.rewards, color="black", linewidth=1.2, label="attainable")
    ends.set_xlabel("KL to the pretrained model (nats per response)")
    ends.set_ylabel("reward (VADER, -1 to 1)")
    ends.grid(alpha=0.3)
    ends.legend(frameon=False, fontsize=9)
    return plot


if __name__ == "__main__":
    main(TITLE, CLAIM, read)
