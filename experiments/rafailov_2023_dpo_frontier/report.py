"""Judges DPO's frontier against PPO's: `python -m experiments.rafailov_2023_dpo_frontier.report FOLDER ...`."""

from collections.abc import Iterator, Mapping, Sequence

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from experiments.claims import Claim, Numbers
from experiments.figures import Point, curves, frontier, panels
from experiments.frontier import BUDGETS, Frontier, best_within, reference_curves
from experiments.margins import margin_fields
from experiments.reports import Report, main
from experiments.run_folders import Run, by
from experiments.samples import samples_of

PAPER = "rafailov_2023_dpo_frontier"
TITLE = "Direct preference optimisation and PPO on the frontier of reward against KL"
CLAIM = (
    "Rafailov et al. 2023, arXiv:2305.18290: DPO gets more reward than PPO at every KL to the reference, even if PPO "
    "learns from the true reward."
)
SCALE = "15M parameters and 256 scored texts a run"
HALF = 0.5  # of the attainable gain
FURTHEST = 12.0  # nats that the figure shows
PLACE = "section 6.1, figure 2, left"
NAMES = {"sigmoid": "DPO", "ipo": "IPO", "hinge": "hinge", "kto_pair": "KTO-pair"}
SLOW_PPO, SMALL_GAIN = "PPO, the paper's controller", 0.1  # K_beta of Ziegler et al. 2019, arXiv:1909.08593
MORE = "2,048 texts"  # of the runs of night_texts.yaml and night_texts_ppo.yaml
Seeds = dict[int, list[Point]]


def read(runs: Sequence[Run]) -> Report:
    """Reads the most reward of each method and seed within each budget of KL, and its share of the attainable gain."""
    texts, references = min(map(texts_of, runs), default=0), reference_curves(runs)
    groups = by_method(runs, texts)
    methods = {name: points_by_seed(group) for name, group in groups.items()}
    optimum = references.get("attainable")
    measured: dict[str, Numbers] = {}
    for name, seeds in methods.items():
        for budget in BUDGETS:
            measured[within(budget, name)] = {seed: best_within(points, budget) for seed, points in seeds.items()}
        for budget in (1.0, *BUDGETS):
            if optimum is not None and optimum.reward(budget) is not None:
                shares = {seed: efficiency(points, budget, optimum) for seed, points in seeds.items()}
                measured[efficiency_name(budget, name)] = shares
    beyond = sum(kl > FURTHEST for seeds in methods.values() for points in seeds.values() for kl, _ in points)
    most = len(by(runs, "seed"))
    fewer = "".join(f"; {name}: {len(seeds)}" for name, seeds in methods.items() if len(seeds) < most)
    captions = {
        "figure": f"{most} seeds{fewer}. (a) Each evaluation of each run up to {FURTHEST:g} nats; steps join the best "
        f"ones of all seeds, which are not what is judged; {beyond} evaluations lie further. The reward scored "
        f"{texts:,} texts in a run, or as many as a name says. (b) The most reward within a budget, medians of the "
        "seeds, bands from the lower to the upper quartile. Black: the best reward at each KL, estimated by samples "
        "that follow the optimal policies, with its standard error (grey); dotted: the best of 1, 2, 4, ... samples "
        "of the reference.",
    }
    samples = samples_of({name: group[0] for name, group in groups.items()})
    figures = {"figure": figure(methods, references)}
    if optimum is not None:
        figures["efficiency"] = efficiency_figure(methods, optimum)
        errors = {budget: optimum.relative_error(budget) for budget in (BUDGETS[0], BUDGETS[-1])}
        known = [f"{error:.1%} at {budget:g} nats" for budget, error in errors.items() if error is not None]
        captions["efficiency"] = "The gain of the most reward within a budget, divided by the attainable gain."
        if known:
            captions["efficiency"] += (
                f" With other openings the attainable gain has a standard error of {' and of '.join(known)}."
            )
    return Report(measured, [*claims_about(), *claims_about_texts()], figures, captions, samples)


def within(budget: float, method: str) -> str:
    """The name of the most reward of a method within a budget."""
    return f"reward within {budget:g} nats, {method}"


def efficiency_name(budget: float, method: str) -> str:
    """The name of that reward's share of the attainable gain."""
    return f"efficiency within {budget:g} nats, {method}"


def claims_about() -> Iterator[Claim]:
    """The paper's claims, and ours about the distance from the optimum."""
    for budget in BUDGETS:
        yield Claim(
            f"within {budget:g} nats DPO gets more reward than PPO with the true reward",
            (within(budget, "DPO"), within(budget, "PPO")),
            "more",
            **margin_fields(PAPER, "reward"),
            scale=SCALE,
            place=PLACE,
        )
    for first, second in (("GRPO", "PPO"), ("DPO", "GRPO"), ("RAFT", "PPO")):
        yield Claim(
            f"within {BUDGETS[1]:g} nats {first} gets more reward than {second}",
            (within(BUDGETS[1], first), within(BUDGETS[1], second)),
            "more",
            **margin_fields(PAPER, "reward"),
            origin="ours",
        )
    yield Claim(
        f"within {BUDGETS[1]:g} nats the paper's controller (gain {SMALL_GAIN:g}, not 0.5) hardly changes PPO's reward",
        (within(BUDGETS[1], SLOW_PPO), within(BUDGETS[1], "PPO")),
        "little",
        **margin_fields(PAPER, "reward"),
        origin="ours",
    )
    yield Claim(
        f"within {BUDGETS[1]:g} nats DPO gets more reward than SFT on the chosen",
        (within(BUDGETS[1], "DPO"), within(BUDGETS[1], "SFT on the chosen")),
        "more",
        **margin_fields(PAPER, "reward"),
        scale=SCALE,
        place=PLACE,
    )
    yield Claim(
        f"within {BUDGETS[0]:g} nats DPO gets more than half of the attainable gain of reward",
        (efficiency_name(BUDGETS[0], "DPO"),),
        "more",
        **margin_fields(PAPER, "efficiency"),
        origin="ours",
        than=HALF,
    )


def claims_about_texts() -> Iterator[Claim]:
    """Our claims about more scored texts, and the paper's with these."""
    for method in ("PPO", "DPO"):
        yield Claim(
            f"within {BUDGETS[1]:g} nats {method} gets more reward from {MORE} a run than from 256",
            (within(BUDGETS[1], f"{method}, {MORE}"), within(BUDGETS[1], method)),
            "more",
            **margin_fields(PAPER, "reward"),
            origin="ours",
        )
    yield Claim(
        f"within {BUDGETS[1]:g} nats DPO gets more reward than PPO, each from {MORE} a run",
        (within(BUDGETS[1], f"DPO, {MORE}"), within(BUDGETS[1], f"PPO, {MORE}")),
        "more",
        **margin_fields(PAPER, "reward"),
        scale=f"15M parameters and {MORE} a run",
        place=PLACE,
    )


def method_of(run: Run) -> str:
    """Returns the method of a run, from settings that only its program has."""
    if "num_generations" in run.config:
        return "GRPO"
    if "rounds" in run.config:
        return "RAFT"
    if "loss_type" in run.config:
        loss = run.config["loss_type"]
        return NAMES.get(loss, str(loss))
    if "init_kl_coef" not in run.config:
        return "SFT on the chosen"
    return SLOW_PPO if run.config["batch_size"] <= SMALL_GAIN * run.config["horizon"] else "PPO"


def points_of(run: Run) -> list[Point]:
    """Returns (KL, reward) of every evaluation, from the reference, whose KL is 0, to the end of training."""
    kls, rewards = run.curve("eval_kl", "eval_reward")
    ends = [(0.0, run.summary["reward_before"]), (run.summary["kl"], run.summary["reward"])]
    return sorted({*zip(kls, rewards, strict=True), *ends})


def texts_of(run: Run) -> int:
    """How many texts the reward scored for a run."""
    is_ppo = "init_kl_coef" in run.config
    return int(run.config["steps"] * run.config["batch_size"] if is_ppo else run.summary["scored_texts"])


def by_method(runs: Sequence[Run], fewest: int) -> dict[str, list[Run]]:
    """Groups runs by method; those with more scored texts than the fewest are another method."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        texts = texts_of(run)
        name = method_of(run) if texts == fewest else f"{method_of(run)}, {texts:,} texts"
        groups.setdefault(name, []).append(run)
    order = [*NAMES.values(), "PPO", "GRPO", "SFT on the chosen", "RAFT", SLOW_PPO]
    return {name: groups[name] for name in sorted(groups, key=lambda name: [*order, name].index(name))}


def points_by_seed(runs: Sequence[Run]) -> Seeds:
    """All points of a method's runs: seed -> points."""
    return {seed: [point for run in group for point in points_of(run)] for seed, group in by(runs, "seed").items()}


def efficiency(points: Sequence[Point], budget: float, optimum: Frontier) -> float:
    """The gain of the best reward within the budget over the reference, divided by the attainable gain."""
    before = next(reward for kl, reward in points if kl == 0)
    share = optimum.efficiency(budget, best_within(points, budget) - before)
    if share is None:
        raise ValueError(f"the attainable frontier ends before {budget:g} nats. Give a budget in its range.")
    return share


def figure(methods: Mapping[str, Seeds], references: Mapping[str, Frontier]) -> plt.Figure:
    """Plots all points, and the most reward within each budget.

    Args:
        methods: their points.
        references: curves to compare with: attainable, best of n; or none.
    """
    plot, (every, best) = panels(("all evaluations", "the most reward within a budget"), height=4.8)
    frontier(every, {name: [point for seed in seeds.values() for point in seed] for name, seeds in methods.items()})
    plot_within(best, methods, [FURTHEST * i / 48 for i in range(49)])
    for axis in (every, best):
        axis.get_legend().remove()  # one below the panels names the lines of both
        for (name, curve), dots in zip(references.items(), ("-", ":"), strict=False):
            axis.plot(curve.kls, curve.rewards, dots, color="black", linewidth=1.2, label=name)
            if curve.errors is not None:
                low, high = curve.rewards - curve.errors, curve.rewards + curve.errors
                axis.fill_between(curve.kls, low, high, color="black", alpha=0.15, linewidth=0)
        axis.set_xlim(-0.5, FURTHEST)
        axis.set_xlabel("KL to the reference (nats per response)")
        axis.set_ylabel("reward of held-out openings (VADER, -1 to 1)")
    plot.legend(*every.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return plot


def efficiency_figure(methods: Mapping[str, Seeds], optimum: Frontier) -> plt.Figure:
    """Plots each method's share of the attainable gain within each budget."""
    plot, axis = plt.subplots(figsize=(5.5, 4.8), layout="constrained")
    farthest = min(FURTHEST, float(optimum.kls[-1]))
    plot_within(axis, methods, [farthest * i / 48 for i in range(2, 49)], optimum)
    axis.get_legend().remove()
    plot.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    axis.set_xlabel("KL to the reference (nats per response)")
    axis.set_ylabel("share of the attainable gain")
    return plot


def plot_within(
    axis: Axes, methods: Mapping[str, Seeds], budgets: Sequence[float], optimum: Frontier | None = None
) -> None:
    """Plots each method's best reward within the budgets, or its efficiency if there is an optimum."""
    value = best_within if optimum is None else lambda points, budget: efficiency(points, budget, optimum)
    curves(
        axis,
        {
            name: [(budgets, [value(points, budget) for budget in budgets]) for points in seeds.values()]
            for name, seeds in methods.items()
        },
    )


if __name__ == "__main__":
    main(TITLE, CLAIM, read)
