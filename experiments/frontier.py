"""What samples of the reference alone say of reward against KL: the attainable frontier, and the best of n."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import xlogy
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.assets import openings, stories15m
from experiments.assets.registry import build_once, cache_dir
from experiments.best_of import expected_best_of, kl_of_best, powers
from experiments.evaluation import continued
from experiments.run_folders import Run

LEAST_EFFECTIVE = 10.0  # samples for each prompt, below which the curve ends
TEMPERATURES = 400  # values of beta
ANSWERS, REWARDS = "answers.json", "rewards_of_reference.json"
BUDGETS = (2.0, 4.0, 8.0)  # in nats per response
BANK = {"prompts": 32, "samples": 256}  # at most so many openings, and samples of each


@dataclass(frozen=True)
class Frontier:
    """A mean reward at each mean KL to the reference.

    Attributes:
        kls: In nats per response, ascending from 0, [B].
        rewards: The mean rewards at them, from the reference's, [B].
    """

    kls: np.ndarray
    rewards: np.ndarray

    def reward(self, kl: float) -> float | None:
        """The attainable reward at a KL; None where the samples do not reach it."""
        if not 0 <= kl <= self.kls[-1]:
            return None
        return float(np.interp(kl, self.kls, self.rewards))

    def efficiency(self, kl: float, gain: float) -> float | None:
        """A policy's gain of reward over the reference, divided by the attainable gain at its KL.

        Args:
            kl: The policy's KL to the reference, in nats per response.
            gain: Its mean reward minus the reference's, on the prompts of the frontier or on prompts like them.

        Returns:
            1 for the optimal policy, 0 for one that gains nothing; None at a KL of 0 and beyond the frontier's range.
        """
        best = self.reward(kl)
        attainable_gain = 0.0 if best is None else best - float(self.rewards[0])
        return gain / attainable_gain if attainable_gain > 0 else None


def attainable(rewards: np.ndarray, *, least_effective: float = LEAST_EFFECTIVE) -> Frontier:
    """The frontier that reweighting the reference's samples with exp(r / beta) reaches.

    The policy of the most reward at its KL is pi(y | x) proportional to ref(y | x) exp(r(x, y) / beta) (Rafailov et al.
    2023, arXiv:2305.18290, Eq. 4; Ziegler et al. 2019, arXiv:1909.08593, section 2). N samples of the reference
    estimate it: with the weights w_i = exp(r_i / beta) / sum_j exp(r_j / beta) its reward is sum_i w_i r_i, and its KL
    is sum_i w_i log(N w_i). One beta holds for all prompts, because that is best for the mean KL over prompts.

    The curve ends where the effective number of samples for a prompt, 1 / sum_i w_i^2 (harmonic mean over prompts),
    falls below `least_effective`. The estimate lies below the true frontier in expectation, so that efficiencies
    against it are too high: the frontier at a KL of K is the least beta K + beta E[log E[exp(r / beta)]] over beta, and
    the logarithm of a sample's mean is too small in expectation. The bias grows towards the end of the curve.

    Args:
        rewards: Of N samples of the reference for each of P prompts, [P, N].
        least_effective: Smallest effective number of samples for a prompt.

    Raises:
        ValueError: The rewards are not a finite table, or there are too few samples.
    """
    rewards = np.asarray(rewards, dtype=float)
    if rewards.ndim != 2 or not np.isfinite(rewards).all() or rewards.shape[1] < least_effective:
        raise ValueError(
            f"got rewards of shape {rewards.shape}; finite rewards [prompts, samples] with at least "
            f"{least_effective:g} samples of each prompt are needed. Sample more answers of the reference."
        )
    spread = float(rewards.std(axis=1).mean())
    inverse_betas = [0.0, *(np.geomspace(0.01, 100, TEMPERATURES) / spread)] if spread else [0.0]
    points = []
    for inverse_beta in inverse_betas:
        weights = np.exp(inverse_beta * (rewards - rewards.max(axis=1, keepdims=True)))
        weights /= weights.sum(axis=1, keepdims=True)
        if 1 / (weights**2).sum(axis=1).mean() < least_effective:
            break
        kl = xlogy(weights, weights * rewards.shape[1]).sum(axis=1).mean()
        points.append((kl, (weights * rewards).sum(axis=1).mean()))
    kls, means = np.asarray(points).T
    return Frontier(np.maximum.accumulate(np.maximum(kls, 0.0)), means)


def best_of_n(rewards: np.ndarray) -> Frontier:
    """The mean reward of the best of n samples of the reference, and its KL, for n = 1, 2, 4, ... to half the samples.

    Args:
        rewards: Of N samples of the reference for each of P prompts, [P, N].
    """
    ranked = np.sort(np.asarray(rewards, dtype=float), axis=1)[:, ::-1].tolist()
    ns = powers(len(ranked[0]) // 2)
    means = [np.mean([expected_best_of(row, n) for row in ranked]) for n in ns]
    return Frontier(np.array([kl_of_best(n) for n in ns]), np.array(means))


def best_within(points: Sequence[tuple[float, float]], budget: float) -> float:
    """Returns the largest reward at a KL of at most `budget`, over the points (KL, reward) and their mixtures.

    A policy that answers with one of two policies at random has the mean of their rewards and, because the KL is
    convex, at most the mean of their KLs. The frontier is therefore the concave hull of the points.

    Args:
        points: At least one, the reference's, has a KL of 0.
        budget: In nats per response.
    """
    inside = [(kl, reward) for kl, reward in points if kl <= budget]
    beyond = [(kl, reward) for kl, reward in points if kl > budget]
    mixed = [low + (high - low) * (budget - kl) / (more - kl) for kl, low in inside for more, high in beyond]
    return max([*mixed, *(reward for _, reward in inside)])


def rewards_within(points: Sequence[tuple[float, float]]) -> dict[str, float]:
    """`best_within` each of BUDGETS, by the names of a run's summary."""
    return {f"reward_within_{budget:g}": best_within(points, budget) for budget in BUDGETS}


def frontier_of(runs: Sequence[Run], reward: Callable[[Sequence[str]], Sequence[float]]) -> Frontier | None:
    """The attainable frontier on the openings of runs, where `bank_rewards` has samples."""
    rewards = bank_rewards(runs, reward)
    return None if rewards is None else attainable(rewards)


def bank_rewards(runs: Sequence[Run], reward: Callable[[Sequence[str]], Sequence[float]]) -> np.ndarray | None:
    """The rewards of stories15m's continuations of the openings that runs are evaluated on.

    The folder of the first run keeps them, so that an archive of the runs has them.

    Returns:
        [P, N], for N continuations of each of P openings. None if the runs have a single seed, which is not worth the
        minutes of sampling; if they train another model; or if they differ in the openings or the length of answers.
    """
    if len({run.config["seed"] for run in runs}) == 1:
        return None
    names = ("model", "eval_split", "eval_prompts", "max_new_tokens")
    settings = {tuple(run.config.get(name) for name in names) for run in runs}
    if len(settings) > 1 or (setting := next(iter(settings)))[0] != "stories15m":
        return None
    _, split, count, max_new_tokens = setting
    if not (file := runs[0].folder / REWARDS).exists():
        prompts = openings(split)[: min(count, BANK["prompts"])]
        answers = stories_answers(prompts, samples=BANK["samples"], max_new_tokens=max_new_tokens)
        file.write_text(json.dumps([list(reward(texts)) for texts in answers]) + "\n", encoding="utf-8")
    return np.asarray(json.loads(file.read_text(encoding="utf-8")))


def stories_answers(prompts: Sequence[str], *, samples: int, max_new_tokens: int, seed: int = 0) -> list[list[str]]:
    """A bank of stories15m's continuations: `samples` for each prompt, the same on each call.

    The first call samples them (about a fiftieth of a second each on a CPU core, for 16 tokens) and caches them.

    Returns:
        For each prompt its continuations.
    """
    settings = json.dumps([list(prompts), samples, max_new_tokens, seed])

    def sample(folder: Path) -> None:
        name = str(stories15m())
        model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
        repeated = [prompt for prompt in prompts for _ in range(samples)]
        _, texts = continued(model, tokenizer, repeated, max_new_tokens=max_new_tokens, seed=seed)
        rows = [texts[start : start + samples] for start in range(0, len(texts), samples)]
        (folder / ANSWERS).write_text(json.dumps(rows), encoding="utf-8")

    name = hashlib.sha256(settings.encode()).hexdigest()[:16]
    doing = f"sampling {samples} answers to each of {len(prompts)} prompts"
    folder = build_once(cache_dir() / "banks" / f"stories15M-1-{name}", sample, doing)
    return json.loads((folder / ANSWERS).read_text(encoding="utf-8"))
