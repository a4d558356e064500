"""Judges DPO's frontier against PPO's: `python -m experiments.rafailov_2023_dpo_frontier.report FOLDER ...`."""

from collections.abc import Mapping, Sequence
from statistics import median

from matplotlib import pyplot as plt

from experiments.figures import Point, Verdict, curves, frontier
from experiments.reports import Report, main, spread
from experiments.runs import Run
from experiments.sentiment_ppo import samples_of

TITLE = "Direct preference optimisation and PPO on the frontier of reward against KL"
CLAIM = "Rafailov et al. 2023, arXiv:2305.18290: at small KL, DPO's frontier of reward against KL is on or above PPO's."
BUDGETS = (2.0, 4.0, 8.0)  # small KLs in nats per response, chosen before the first run
NAMES = {"sigmoid": "DPO", "ipo": "IPO", "hinge": "hinge", "kto_pair": "KTO-pair"}
Seeds = dict[int, list[Point]]


def judge(runs: Sequence[Run]) -> Report:
    """Compares DPO with PPO at each budget of KL. The other methods are plotted and not judged."""
    methods = by_method(runs)
    verdicts = []
    if {"DPO", "PPO"} <= set(methods):
        seeds = sorted(set(methods["DPO"]) & set(methods["PPO"]))
        if seeds:
            verdicts = [on_or_above(methods["DPO"], methods["PPO"], seeds, budget) for budget in BUDGETS]
    figures = {"figure": figure(methods, scored(runs), is_judged=bool(verdicts))}
    return Report(verdicts, figures, samples_of({f"after {method_of(run)}": run for run in reversed(runs)}))


def method_of(run: Run) -> str:
    """Returns the method of a run, from settings that only its program has."""
    if "loss_type" in run.config:
        loss = run.config["loss_type"]
        return NAMES.get(loss, str(loss))
    return "PPO" if "init_kl_coef" in run.config else "SFT on the chosen"


def points_of(run: Run) -> list[Point]:
    """Returns (KL, reward) of every evaluation, from the reference, whose KL is 0, to the end of training."""
    kls, rewards = run.curve("eval_kl", "eval_reward")
    ends = [(0.0, run.summary["reward_before"]), (run.summary["kl"], run.summary["reward"])]
    return sorted({*zip(kls, rewards, strict=True), *ends})


def by_method(runs: Sequence[Run]) -> dict[str, Seeds]:
    """Groups the points of all runs: method -> seed -> points."""
    groups: dict[str, Seeds] = {}
    for run in runs:
        groups.setdefault(method_of(run), {}).setdefault(run.config["seed"], []).extend(points_of(run))
    order = [*NAMES.values(), "PPO", "SFT on the chosen"]
    return {name: groups[name] for name in sorted(groups, key=lambda name: [*order, name].index(name))}


def best_within(points: Sequence[Point], budget: float) -> float:
    """Returns the largest reward at a KL of at most `budget`, over the points (KL, reward) and their mixtures.

    A policy that answers with one of two policies at random has the mean of their rewards and, because the KL is
    convex, at most the mean of their KLs. The frontier is therefore the concave hull of the points.

    Args:
        points: At least one of them, the reference's, has a KL of 0.
        budget: In nats per response.
    """
    within = [(kl, reward) for kl, reward in points if kl <= budget]
    beyond = [(kl, reward) for kl, reward in points if kl > budget]
    mixed = [low + (high - low) * (budget - kl) / (more - kl) for kl, low in within for more, high in beyond]
    return max([*mixed, *(reward for _, reward in within)])


def on_or_above(dpo: Seeds, ppo: Seeds, seeds: Sequence[int], budget: float) -> Verdict:
    """Compares the medians over the seeds of DPO's and PPO's best reward within the budget."""
    ours, theirs = ([best_within(points[seed], budget) for seed in seeds] for points in (dpo, ppo))
    passed = median(ours) >= median(theirs)
    return Verdict(f"reward within {budget:g} nats, DPO", f"at least PPO's {spread(theirs)}", spread(ours), passed)


def scored(runs: Sequence[Run]) -> dict[str, str]:
    """Returns method -> the number of texts that the reward scored in a run, as text."""
    counts: dict[str, set[int]] = {}
    for run in runs:
        is_ppo = method_of(run) == "PPO"
        count = run.config["steps"] * run.config["batch_size"] if is_ppo else run.summary["scored_texts"]
        counts.setdefault(method_of(run), set()).add(int(count))
    return {method: " or ".join(f"{count:,}" for count in sorted(different)) for method, different in counts.items()}


def figure(methods: Mapping[str, Seeds], texts: Mapping[str, str], *, is_judged: bool) -> plt.Figure:
    """Plots all points with the frontier of each method, and the best reward within each budget over the seeds."""
    plot, axes = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained", sharey=True)
    points = {
        f"{name} ({texts[name]} scored texts)": [point for seed in seeds.values() for point in seed]
        for name, seeds in methods.items()
    }
    frontier(axes[0], points)
    nothing = f"nothing to judge: DPO and PPO of one seed are needed, {', '.join(methods)} came in"
    axes[0].set_title("all points" if is_judged else nothing, fontsize=10)
    axes[0].set_xlabel("KL to the reference (nats per response)")
    axes[0].set_ylabel("reward of held-out openings (VADER)")
    budgets = [max(BUDGETS) * i / 32 for i in range(33)]
    curves(
        axes[1],
        {
            name: [(budgets, [best_within(pairs, budget) for budget in budgets]) for pairs in seeds.values()]
            for name, seeds in methods.items()
        },
    )
    for budget in BUDGETS:
        axes[1].axvline(budget, color="tab:gray", linestyle="--", linewidth=0.8)
    axes[1].set_title("the most reward within a budget of KL", fontsize=10)
    axes[1].set_xlabel("budget (nats per response)")
    return plot


if __name__ == "__main__":
    main(TITLE, CLAIM, judge)
