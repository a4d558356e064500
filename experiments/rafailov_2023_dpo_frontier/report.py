"""Judges DPO's frontier against PPO's: `python -m experiments.rafailov_2023_dpo_frontier.report FOLDER ...`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from math import isfinite

from matplotlib import pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from experiments.claims import Claim, Numbers
from experiments.figures import curves, panels
from experiments.frontier import BUDGETS, Frontier, Point, best_within, reference_curves
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
MORE = "2,048 texts"  # of the runs of night_texts*.yaml
SFT = "SFT on the chosen"
OURS = (("GRPO", "PPO"), ("DPO", "GRPO"), ("RAFT", "PPO"))  # comparisons that the paper has not
Seeds = dict[int, list[Point]]
Methods = Mapping[tuple[int, str], Seeds]  # by the number of scored texts, and the method


def read(runs: Sequence[Run]) -> Report:
    """Reads the most reward of each method and seed within each budget of KL, and its share of the attainable gain."""
    groups, references = by_texts_and_method(runs), reference_curves(runs)
    methods = {key: points_by_seed(key[1], group) for key, group in groups.items()}
    fewest = min((texts for texts, _ in groups), default=0)
    names = {key: key[1] if key[0] == fewest else f"{key[1]}, {key[0]:,} texts" for key in groups}
    optimum = references.get("attainable")
    measured: dict[str, Numbers] = {}
    for key, points_of_seeds in methods.items():
        for budget in BUDGETS:
            best = {seed: best_within(points, budget) for seed, points in points_of_seeds.items()}
            measured[within(budget, names[key])] = best
        for budget in (1.0, *BUDGETS):
            if optimum is not None and optimum.reward(budget) is not None:
                shares = {seed: efficiency(points, budget, optimum) for seed, points in points_of_seeds.items()}
                measured[efficiency_name(budget, names[key])] = shares
    beyond = sum(kl > FURTHEST for seeds in methods.values() for points in seeds.values() for kl, _ in points)
    captions = {
        "figure": "The most reward within a budget of KL: medians of the seeds, bands from the lower to the upper "
        f"quartile. {', '.join(counts_of_seeds(methods))}. Dots: all evaluations up to {FURTHEST:g} nats; {beyond} lie "
        "further. Black: the best reward at each KL, estimated by samples that follow the optimal policies, with its "
        "standard error (grey); dotted: the best of 1, 2, 4, ... samples of the reference.",
    }
    samples = samples_of({names[key]: group[0] for key, group in groups.items()})
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
    for first, second in OURS:
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
        f"within {BUDGETS[1]:g} nats DPO gets more reward than {SFT}",
        (within(BUDGETS[1], "DPO"), within(BUDGETS[1], SFT)),
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
    for method in ("PPO", "DPO", "GRPO", "RAFT", SFT):
        yield Claim(
            f"within {BUDGETS[1]:g} nats {method} gets more reward from {MORE} a run than from 256",
            (within(BUDGETS[1], f"{method}, {MORE}"), within(BUDGETS[1], method)),
            "more",
            **margin_fields(PAPER, "reward"),
            origin="ours",
        )
    for first, second in (("DPO", "PPO"), ("DPO", SFT)):
        yield Claim(
            f"within {BUDGETS[1]:g} nats {first} gets more reward than {second}, each from {MORE} a run",
            (within(BUDGETS[1], f"{first}, {MORE}"), within(BUDGETS[1], f"{second}, {MORE}")),
            "more",
            **margin_fields(PAPER, "reward"),
            scale=f"15M parameters and {MORE} a run",
            place=PLACE,
        )
    for first, second in OURS:
        yield Claim(
            f"within {BUDGETS[1]:g} nats {first} gets more reward than {second}, each from {MORE} a run",
            (within(BUDGETS[1], f"{first}, {MORE}"), within(BUDGETS[1], f"{second}, {MORE}")),
            "more",
            **margin_fields(PAPER, "reward"),
            origin="ours",
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
        return SFT
    return SLOW_PPO if run.config["batch_size"] <= SMALL_GAIN * run.config["horizon"] else "PPO"


def points_of(run: Run) -> list[Point]:
    """Returns (KL, reward) of every evaluation, from the reference, whose KL is 0, to the end of training."""
    kls, rewards = run.curve("eval_kl", "eval_reward")
    ends = [(0.0, run.summary["reward_before"]), (run.summary["kl"], run.summary["reward"])]
    points = sorted({*zip(kls, rewards, strict=True), *ends})
    if not all(map(isfinite, chain(*points))):
        raise ValueError(
            f"{run.folder}: an evaluation is no finite number: {points}. Leave out this run and the others of its "
            "method and seed, and say so."
        )
    return points


def texts_of(run: Run) -> int:
    """How many texts the reward scored for a run."""
    is_ppo = "init_kl_coef" in run.config
    return int(run.config["steps"] * run.config["batch_size"] if is_ppo else run.summary["scored_texts"])


def by_texts_and_method(runs: Sequence[Run]) -> dict[tuple[int, str], list[Run]]:
    """Groups runs by the number of scored texts, the fewest first, and by method."""
    groups: dict[tuple[int, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((texts_of(run), method_of(run)), []).append(run)
    order = [*NAMES.values(), "PPO", "GRPO", SFT, "RAFT", SLOW_PPO]
    return {key: groups[key] for key in sorted(groups, key=lambda key: (key[0], [*order, key[1]].index(key[1])))}


def counts_of_seeds(methods: Methods) -> list[str]:
    """How many seeds the methods have: "256 texts: 16 seeds (SFT: 8)"."""
    words = []
    for texts in dict.fromkeys(texts for texts, _ in methods):
        counts = {method: len(seeds) for (each, method), seeds in methods.items() if each == texts}
        most = max(counts.values())
        fewer = [f"{method}: {count}" for method, count in counts.items() if count < most]
        words.append(f"{texts:,} texts: {most} seed{'s' * (most > 1)}" + (f" ({', '.join(fewer)})" if fewer else ""))
    return words


def points_by_seed(method: str, runs: Sequence[Run]) -> Seeds:
    """All points of a method's runs: seed -> points.

    Raises:
        ValueError: The seeds have runs of different settings, so that some frontiers have more to choose from.
    """
    groups = by(runs, "seed")
    shared = sorted(set.intersection(*(set(run.settings) for run in runs)))
    settings = {seed: sorted(str([run.settings[name] for name in shared]) for run in groups[seed]) for seed in groups}
    first = next(iter(groups))
    if strange := [seed for seed in groups if settings[seed] != settings[first]]:
        raise ValueError(
            f"{method}: the seeds {strange} have other runs than seed {first}; a frontier pools the runs of a seed, so "
            "that each seed needs the same settings. Let the sweep finish, or give the folders of one tier."
        )
    return {seed: [point for run in group for point in points_of(run)] for seed, group in groups.items()}


def efficiency(points: Sequence[Point], budget: float, optimum: Frontier) -> float:
    """The gain of the best reward within the budget over the reference, divided by the attainable gain."""
    before = next(reward for kl, reward in points if kl == 0)
    share = optimum.efficiency(budget, best_within(points, budget) - before)
    if share is None:
        raise ValueError(f"the attainable frontier ends before {budget:g} nats. Give a budget in its range.")
    return share


def figure(methods: Methods, references: Mapping[str, Frontier]) -> plt.Figure:
    """Plots all points and the most reward within each budget, in a panel for each number of scored texts.

    Args:
        methods: their points.
        references: curves to compare with: attainable, best of n; or none.
    """
    plot, axes = panels_by_texts(methods, [FURTHEST * i / 48 for i in range(49)], best_within)
    for axis, texts in axes.items():
        for (each, method), seeds in methods.items():
            if each == texts:
                points = [point for of_seed in seeds.values() for point in of_seed]
                axis.scatter(*zip(*points, strict=True), s=5, alpha=0.3, linewidths=0, color=color_of(methods, method))
        for (name, curve), dots in zip(references.items(), ("-", ":"), strict=False):
            axis.plot(curve.kls, curve.rewards, dots, color="black", linewidth=1.2, label=name)
            if curve.errors is not None:
                low, high = curve.rewards - curve.errors, curve.rewards + curve.errors
                axis.fill_between(curve.kls, low, high, color="black", alpha=0.15, linewidth=0)
        axis.set_xlim(-0.5, FURTHEST)
    return finished(plot, [*axes], "reward of held-out openings (VADER, -1 to 1)")


def efficiency_figure(methods: Methods, optimum: Frontier) -> plt.Figure:
    """Plots each method's share of the attainable gain within each budget, in the same panels."""
    farthest = min(FURTHEST, float(optimum.kls[-1]))
    budgets = [farthest * i / 48 for i in range(2, 49)]
    plot, axes = panels_by_texts(methods, budgets, lambda points, budget: efficiency(points, budget, optimum))
    return finished(plot, [*axes], "share of the attainable gain")


def panels_by_texts(
    methods: Methods, budgets: Sequence[float], value: Callable[[Sequence[Point], float], float]
) -> tuple[plt.Figure, dict[Axes, int]]:
    """Plots a value within each budget of the methods' points; returns the panels with their numbers of texts."""
    counts = list(dict.fromkeys(texts for texts, _ in methods))
    plot, axes = panels([f"{texts:,} scored texts a run" for texts in counts], height=4.8, sharey=True)
    for axis, count in zip(axes, counts, strict=True):
        group = {method: seeds for (texts, method), seeds in methods.items() if texts == count}
        axis.set_prop_cycle(color=[color_of(methods, method) for method in group])
        curves(
            axis,
            {
                name: [(budgets, [value(points, budget) for budget in budgets]) for points in seeds.values()]
                for name, seeds in group.items()
            },
        )
        for line, method in zip(axis.lines, group, strict=True):
            line.set_label(method)  # the caption counts the seeds
    return plot, dict(zip(axes, counts, strict=True))


def color_of(methods: Methods, method: str) -> str:
    """A method's colour, the same in all panels."""
    colors: list[str] = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    return colors[list(dict.fromkeys(each for _, each in methods)).index(method) % len(colors)]


def finished(plot: plt.Figure, axes: Sequence[Axes], label: str) -> plt.Figure:
    """Labels the axes, and puts one legend below the panels."""
    lines: dict[str, Artist] = {}
    for axis in axes:
        axis.get_legend().remove()
        axis.set_xlabel("KL to the reference (nats per response)")
        handles, names = axis.get_legend_handles_labels()
        lines |= dict(zip(names, handles, strict=True))
    axes[0].set_ylabel(label)
    plot.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return plot


if __name__ == "__main__":
    main(TITLE, CLAIM, read)
