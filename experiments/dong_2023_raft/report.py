"""Judges the rewards of RAFT's rounds: `python -m experiments.dong_2023_raft.report FOLDER ...`."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median

from matplotlib import pyplot as plt

from experiments.figures import Verdict, curves
from experiments.reports import Report, main, spread
from experiments.runs import Run, by
from experiments.sentiment_ppo import samples_of

TITLE = "Fine-tuning on the best of K samples, round after round"
CLAIM = "Dong et al. 2023, arXiv:2304.06767 (RAFT): the reward rises each round, and a larger K climbs faster."
SATURATED = 0.9  # the largest reward is 1; above this a round need not rise
FIRST = 2  # rounds over which the speed of climbing is compared


def judge(runs: Sequence[Run]) -> Report:
    """Judges whether the reward of each K above 1 rises every round, and compares neighbouring K."""
    groups = by(runs, "k")
    verdicts = [rises(k, group) for k, group in groups.items() if k > 1]
    verdicts += [verdict for low, high in pairwise(groups) for verdict in faster(low, high, groups)]
    samples = samples_of({f"after training, K = {k}": group[0] for k, group in groups.items()})
    return Report(verdicts, {"figure": figure(groups)}, samples)


def climb(run: Run) -> list[float]:
    """Returns the reward of held-out prompts before the first round and after each round."""
    rounds, rewards = run.curve("round", "eval_reward")
    if rounds != list(range(len(rounds))) or len(rounds) < 2:
        raise ValueError(
            f"{run.folder} has evaluations at rounds {rounds}; one before the first round and after each is needed. "
            "Run it again from the start."
        )
    return rewards


def rises(k: int, runs: Sequence[Run]) -> Verdict:
    """Judges whether the median over the seeds rises every round until it is near the largest reward."""
    medians = [median(rewards) for rewards in zip(*map(climb, runs), strict=False)]
    passed = all(later > earlier for earlier, later in pairwise(medians) if earlier < SATURATED)
    expected = f"each round above the one before, until {SATURATED:g}"
    return Verdict(f"K = {k}: the reward rises each round", expected, " ".join(f"{x:.3f}" for x in medians), passed)


def faster(low: int, high: int, groups: Mapping[int, Sequence[Run]]) -> list[Verdict]:
    """Compares the mean reward of the first rounds, paired by seed; no verdict if no seed has both."""
    slow, fast = ({run.config["seed"]: fmean(climb(run)[1 : FIRST + 1]) for run in groups[k]} for k in (low, high))
    seeds = sorted(set(slow) & set(fast))
    if not seeds:
        return []
    passed = all(fast[seed] > slow[seed] for seed in seeds)
    expected = f"above {spread(slow[seed] for seed in seeds)} in each seed"
    claim = f"K = {high} climbs faster than K = {low}: mean of rounds 1 to {FIRST}"
    return [Verdict(claim, expected, spread(fast[seed] for seed in seeds), passed)]


def figure(groups: Mapping[int, Sequence[Run]]) -> plt.Figure:
    """Plots the reward of held-out prompts, and of the samples that the policy learns, over the rounds."""
    plot, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    curves(axes[0], {f"K = {k}": [run.curve("round", "eval_reward") for run in group] for k, group in groups.items()})
    curves(
        axes[1], {f"K = {k}": [run.curve("round", "reward_of_best") for run in group] for k, group in groups.items()}
    )
    axes[0].set_title("held-out prompts", fontsize=10)
    axes[1].set_title("the best of K, which are learnt", fontsize=10)
    axes[0].set_ylabel("reward (VADER, -1 to 1)")
    for axis in axes:
        axis.set_xlabel("rounds done")
    return plot


if __name__ == "__main__":
    main(TITLE, CLAIM, judge)
