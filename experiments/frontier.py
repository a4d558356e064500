"""The most reward that is attainable at each KL to the reference, and the best of n, by samples of the reference alone.

`python -m experiments.frontier` samples the reference (three quarters of an hour on one core) and writes
attainable.json, which runs and reports read.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.interpolate import CubicHermiteSpline
from scipy.special import logsumexp, softmax
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.assets import openings, stories15m
from experiments.best_of import expected_best_of, kl_of_best, powers
from experiments.run_folders import Run, sampled_ids
from experiments.sentiment import sentiment
from trimtab_lm.sampling.generate import response_texts

BUDGETS = (2.0, 4.0, 8.0)  # in nats per response
COMMITTED = Path(__file__).with_name("attainable.json")
SETTINGS: Mapping[str, Any] = {"model": "stories15m", "eval_split": "test", "max_new_tokens": 16}  # of these curves
PROMPTS = (96, 128)  # numbers of openings, the first of the split, that have curves
SAMPLES = 512  # of the reference, for each opening
ANCESTORS, CHAIN = 32, 8  # chains for each opening at each temperature, and answers of a chain
EFFECTIVE = 0.5  # share of the answers that counts at the next temperature
FARTHEST = 12.0  # nats
STEP = 0.05  # nats between two points of the committed frontier
NOTHING = -1  # in a row of token ids, after the answer's end

Point = tuple[float, float]
"""A mean KL to the reference, in nats per response, and a mean reward."""
Propose = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Takes answers [P, M, ...] and returns others of the same shape, with their rewards [P, M]."""


@dataclass(frozen=True)
class Frontier:
    """A mean reward at each mean KL to the reference.

    Attributes:
        kls: In nats per response, ascending from 0, [B].
        rewards: The mean rewards at them, from the reference's, [B].
        errors: Standard errors of these rewards, [B], for another choice of prompts; or none.
        gain_errors: Those of the rewards less the reference's, [B]; or none.
    """

    kls: np.ndarray
    rewards: np.ndarray
    errors: np.ndarray | None = None
    gain_errors: np.ndarray | None = None

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

    def relative_error(self, kl: float) -> float | None:
        """The attainable gain's standard error, as a share of it; None where the curve has none or ends before."""
        best = self.reward(kl)
        if best is None or self.gain_errors is None:
            return None
        return float(np.interp(kl, self.kls, self.gain_errors)) / (best - float(self.rewards[0]))


@dataclass(frozen=True)
class Tempered:
    """The optimal policies of ascending 1 / beta, from the reference, whose 1 / beta is 0.

    Attributes:
        inverse_betas: [T].
        kls: In nats per response, of each policy (T) and prompt (P), [T, P].
        rewards: Mean rewards, [T, P].
    """

    inverse_betas: np.ndarray
    kls: np.ndarray
    rewards: np.ndarray

    def frontier(self, step: float = STEP) -> Frontier:
        """The mean reward over prompts at each `step` of the mean KL, with errors by the jackknife over prompts."""
        count = self.kls.shape[1]
        whole = self.kls.mean(axis=1), self.rewards.mean(axis=1)
        without = [
            tuple(
                (mean * count - rows[:, i]) / (count - 1)
                for mean, rows in zip(whole, (self.kls, self.rewards), strict=True)
            )
            for i in range(count if count > 1 else 0)
        ]
        kls = np.arange(0.0, min(curve[0][-1] for curve in (whole, *without)) + 1e-9, step)
        rewards = self.interpolated(*whole, kls)
        if not without:
            return Frontier(kls, rewards)
        others = np.stack([self.interpolated(*curve, kls) for curve in without])
        errors, gain_errors = (each.std(axis=0) * (count - 1) ** 0.5 for each in (others, others - others[:, :1]))
        return Frontier(kls, rewards, errors, gain_errors)

    def of_first(self, count: int) -> "Tempered":
        """The same for the first `count` prompts."""
        return Tempered(self.inverse_betas, self.kls[:, :count], self.rewards[:, :count])

    def interpolated(self, kls: np.ndarray, rewards: np.ndarray, at: np.ndarray) -> np.ndarray:
        """The rewards at the KLs of `at`, by a curve through the points whose slope at each of them is its beta."""
        rising = np.concatenate([[True], kls[1:] > np.maximum.accumulate(kls)[:-1]])
        kls, rewards, inverse_betas = kls[rising], rewards[rising], self.inverse_betas[rising]
        if len(kls) == 1:
            return np.full(len(at), rewards[0])
        slopes = 1 / inverse_betas[1:]
        first = 2 * (rewards[1] - rewards[0]) / (kls[1] - kls[0]) - slopes[0]  # the reference's own is infinite
        return CubicHermiteSpline(kls, rewards, np.concatenate([[first], slopes]))(at)


def tempered(
    answers: np.ndarray,
    rewards: np.ndarray,
    propose: Propose,
    rng: np.random.Generator,
    *,
    farthest: float = FARTHEST,
    ancestors: int = ANCESTORS,
    chain: int = CHAIN,
) -> Tempered:
    """Follows the optimal policies away from the reference by a waste-free sequential Monte Carlo sampler.

    The policy of the most reward at its KL is pi(y | x) = ref(y | x) exp(r(x, y) / beta) / Z(x) (Rafailov et al. 2023,
    arXiv:2305.18290, Eq. 4; Ziegler et al. 2019, arXiv:1909.08593, section 2). One beta holds for all prompts, because
    that is best for the mean KL over prompts.

    Answers of one beta, weighted by exp(r (1 / beta' - 1 / beta)), are answers of a lower beta'. Their mean weight is
    Z' / Z, their weighted mean reward is the policy's, and KL = E[r] / beta' - log Z'. beta' is such that EFFECTIVE of
    the answers count. Then `ancestors` of them, drawn by weight, each start a chain of Metropolis and Hastings: a
    proposal, which leaves the reference's distribution as it is, is taken with probability min(1, exp((r' - r) /
    beta')). All answers of the chains are the answers of beta' (Dau and Chopin 2022, arXiv:2011.02328, algorithm 2).

    The estimate lies below the true frontier in expectation, and more so towards its end, so that efficiencies against
    it are too high: chains lag behind the policy, and the logarithm of a sample's mean weight is too small.

    Args:
        answers: Of the reference, for each of P prompts, [P, N, ...].
        rewards: Their rewards, [P, N].
        propose: Draws answers in detailed balance with the reference, such as ends that the reference writes anew.
        rng: Draws the ancestors, and which proposals are taken.
        farthest: The mean KL after which no further policy is estimated, in nats.
        ancestors: Chains for each prompt.
        chain: Answers of a chain, with its ancestor.

    Raises:
        ValueError: The rewards are not a finite table, or there are fewer than two samples of a prompt.
    """
    rewards = np.asarray(rewards, dtype=float)
    if rewards.ndim != 2 or not np.isfinite(rewards).all() or rewards.shape[1] < 2:
        raise ValueError(
            f"got rewards of shape {rewards.shape}; finite rewards [prompts, samples] with at least 2 samples of each "
            "prompt are needed. Sample more answers of the reference."
        )
    inverse_beta, log_z = 0.0, np.zeros(len(rewards))
    points = [(0.0, log_z, rewards.mean(axis=1))]
    while largest := largest_step(rewards):
        # The reference's curve bends most at its beginning, where its own answers give every point.
        for step in largest * (np.arange(1, 21) / 20 if inverse_beta == 0 else np.ones(1)):
            weights = softmax(step * rewards, axis=1)
            mean = (weights * rewards).sum(axis=1)
            gain = logsumexp(step * rewards, axis=1) - np.log(rewards.shape[1])
            points.append((inverse_beta + step, (inverse_beta + step) * mean - log_z - gain, mean))
        if points[-1][1].mean() >= farthest:
            break
        inverse_beta, log_z = inverse_beta + largest, log_z + gain
        answers, rewards = moved(
            answers, rewards, weights, propose, rng, inverse_beta=inverse_beta, ancestors=ancestors, chain=chain
        )
    return Tempered(*map(np.stack, zip(*points, strict=True)))


def largest_step(rewards: np.ndarray) -> float:
    """The increase of 1 / beta after which EFFECTIVE of the answers count; 0 where no increase gets there.

    The count is the effective number of samples, 1 / sum_i w_i^2 (harmonic mean over prompts).

    Args:
        rewards: [P, N].
    """
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        share = 1 / (rewards.shape[1] * (softmax(middle * rewards, axis=1) ** 2).sum(axis=1).mean())
        low, high = (middle, high) if share > EFFECTIVE else (low, middle)
    return 0.0 if high == 1e6 else low


def moved(
    answers: np.ndarray,
    rewards: np.ndarray,
    weights: np.ndarray,
    propose: Propose,
    rng: np.random.Generator,
    *,
    inverse_beta: float,
    ancestors: int,
    chain: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Draws `ancestors` of the answers by their weights [P, N], and returns the answers of the chains from them."""
    # Systematic: each answer is drawn as often as its weight says, rounded up or down.
    places = (np.arange(ancestors) + rng.random((len(rewards), 1))) / ancestors
    ends = np.cumsum(weights, axis=1)
    drawn = np.stack([np.searchsorted(end / end[-1], place) for end, place in zip(ends, places, strict=True)])
    rows = np.arange(len(rewards))[:, None]
    states = [(answers[rows, drawn], rewards[rows, drawn])]
    for _ in range(chain - 1):
        current, reward = states[-1]
        other, other_reward = propose(current)
        taken = np.log1p(-rng.random(reward.shape)) < inverse_beta * (other_reward - reward)
        wide = taken.reshape(taken.shape + (1,) * (current.ndim - 2))
        states.append((np.where(wide, other, current), np.where(taken, other_reward, reward)))
    kept, kept_rewards = zip(*states, strict=True)
    return np.concatenate(kept, axis=1), np.concatenate(kept_rewards, axis=1)


class Endings:
    """Proposals for `tempered`: the reference writes the end of each answer anew, from a place that chance gives.

    Args:
        prompts: P texts.
        max_new_tokens: Of an answer.
        seed: Of the places and of the samples.
    """

    def __init__(self, prompts: Sequence[str], *, max_new_tokens: int, seed: int):
        name = str(stories15m())
        self.model = AutoModelForCausalLM.from_pretrained(name)
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        self.queries = [torch.tensor(self.tokenizer(prompt)["input_ids"]) for prompt in prompts]
        self.max_new_tokens, self.rng = max_new_tokens, np.random.default_rng(seed)

    def first(self, samples: int) -> tuple[np.ndarray, np.ndarray]:
        """Answers of the reference, [P, samples, R], with NOTHING after an answer's end, and their rewards."""
        return self.written(np.zeros((len(self.queries), samples, self.max_new_tokens), dtype=np.int64), 0)

    def __call__(self, answers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Answers [P, M, R] to others of the same shape, and their rewards [P, M]."""
        return self.written(answers, int(self.rng.integers(self.max_new_tokens)))

    def written(self, answers: np.ndarray, cut: int) -> tuple[np.ndarray, np.ndarray]:
        """Answers whose tokens from `cut` on are the reference's, and their rewards."""
        others = answers.copy()
        others[..., cut:] = NOTHING
        unfinished = np.argwhere(answers[..., cut] != NOTHING)  # an answer that ended before the place stays
        prefixes = [torch.cat([self.queries[i], torch.from_numpy(answers[i, j, :cut])]) for i, j in unfinished.tolist()]
        ends = sampled_ids(
            self.model,
            self.tokenizer,
            prefixes,
            max_new_tokens=self.max_new_tokens - cut,
            seed=int(self.rng.integers(2**31)),
            batch_size=256,
        )
        for (i, j), end in zip(unfinished.tolist(), ends, strict=True):
            others[i, j, cut : cut + len(end)] = end.numpy()
        return others, self.rewards(others)

    def rewards(self, answers: np.ndarray) -> np.ndarray:
        """Token ids [P, M, R] to the sentiment of their texts, [P, M]."""
        queries = [query for query in self.queries for _ in range(answers.shape[1])]
        rows = [torch.from_numpy(row[row != NOTHING]) for row in answers.reshape(len(queries), -1)]
        return np.reshape(sentiment(response_texts(self.tokenizer, queries, rows)), answers.shape[:2])


def best_of_n(rewards: np.ndarray) -> Frontier:
    """The mean reward of the best of n samples of the reference, and its KL, for n = 1, 2, 4, ... to half the samples.

    Args:
        rewards: Of N samples of the reference for each of P prompts, [P, N].
    """
    ranked = np.sort(np.asarray(rewards, dtype=float), axis=1)[:, ::-1].tolist()
    ns = powers(len(ranked[0]) // 2)
    means = [np.mean([expected_best_of(row, n) for row in ranked]) for n in ns]
    return Frontier(np.array([kl_of_best(n) for n in ns]), np.array(means))


def best_within(points: Sequence[Point], budget: float) -> float:
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


def rewards_within(points: Sequence[Point]) -> dict[str, float]:
    """`best_within` each of BUDGETS, by the names of a run's summary."""
    return {f"reward_within_{budget:g}": best_within(points, budget) for budget in BUDGETS}


def efficiency_at_end(config: Mapping[str, Any], numbers: Mapping[str, float]) -> dict[str, float]:
    """The efficiency of a trained policy by the committed frontier, by its name in a run's summary.

    Args:
        config: The settings of the run.
        numbers: reward_before, reward and kl (nats per response).

    Returns:
        Nothing where the frontier is of other settings, or ends before the KL.
    """
    if not (curves := committed_curves(config)):
        return {}
    share = curves["attainable"].efficiency(numbers["kl"], numbers["reward"] - numbers["reward_before"])
    return {} if share is None else {"efficiency": share}


def reference_curves(runs: Sequence[Run]) -> dict[str, Frontier]:
    """The committed curves, if they are of the settings of all the runs; else none."""
    settings = {tuple(run.config.get(name) for name in (*SETTINGS, "eval_prompts")) for run in runs}
    return committed_curves(runs[0].config) if len(settings) == 1 else {}


def committed_curves(config: Mapping[str, Any]) -> dict[str, Frontier]:
    """The curves `attainable` and `best of n` on the openings of a run's evaluation; none for other settings."""
    if any(config.get(name) != value for name, value in SETTINGS.items()):
        return {}
    curves = json.loads(COMMITTED.read_text(encoding="utf-8"))["curves"].get(str(config.get("eval_prompts")), {})
    return {name: Frontier(**{key: np.asarray(row) for key, row in curve.items()}) for name, curve in curves.items()}


def main() -> None:
    """Samples the reference, and writes the committed curves."""
    prompts = openings(SETTINGS["eval_split"])[: max(PROMPTS)]
    endings = Endings(prompts, max_new_tokens=SETTINGS["max_new_tokens"], seed=0)
    answers, rewards = endings.first(SAMPLES)
    policies = tempered(answers, rewards, endings, np.random.default_rng(0), farthest=FARTHEST)
    curves: dict[str, dict[str, Any]] = {}
    for count in PROMPTS:
        best = best_of_n(rewards[:count])
        frontier = policies.of_first(count).frontier()
        named = {"attainable": frontier, "best of n": best}
        curves[str(count)] = {
            name: {key: np.round(row, 5).tolist() for key, row in vars(curve).items() if row is not None}
            for name, curve in named.items()
        }
        print(f"{count} openings: the frontier ends at {frontier.kls[-1]:.2f} nats")
    content = {"settings": {**SETTINGS, "samples": SAMPLES, "reward": "VADER"}, "curves": curves}
    COMMITTED.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
