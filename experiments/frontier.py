"""What samples of the reference alone say of reward against KL: the attainable frontier, and the best of n.

`python -m experiments.frontier` samples the reference (ten minutes on one core) and writes attainable.json, which
runs and reports read.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import xlogy
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.assets import openings, stories15m
from experiments.assets.registry import build_once, cache_dir
from experiments.best_of import expected_best_of, kl_of_best, powers
from experiments.evaluation import continued
from experiments.run_folders import Run
from experiments.sentiment import sentiment

LEAST_EFFECTIVE = 10.0  # samples for each prompt, below which the curve ends
TEMPERATURES = 400  # values of beta
ANSWERS = "answers.json"
BUDGETS = (2.0, 4.0, 8.0)  # in nats per response
COMMITTED = Path(__file__).with_name("attainable.json")
SETTINGS: Mapping[str, Any] = {"model": "stories15m", "eval_split": "test", "max_new_tokens": 16}  # of these curves
PROMPTS, SAMPLES = 32, 2048  # openings of the committed curves, the first of the split, and samples of each
STEP = 0.05  # nats between two points of the committed frontier


@dataclass(frozen=True)
class Frontier:
    """A mean reward at each mean KL to the reference.

    Attributes:
        kls: In nats per response, ascending from 0, [B].
        rewards: The mean rewards at them, from the reference's, [B].
        errors: Standard errors of these rewards, [B], for another choice of prompts; or none.
    """

    kls: np.ndarray
    rewards: np.ndarray
    errors: np.ndarray | None = None

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
    return committed_curves(runs[0].config) if all(has_curves(run.config) for run in runs) else {}


def committed_curves(config: Mapping[str, Any]) -> dict[str, Frontier]:
    """The curves `attainable` and `best of n` that are committed for a run's settings; else none."""
    if not has_curves(config):
        return {}
    curves = json.loads(COMMITTED.read_text(encoding="utf-8"))["curves"]
    return {name: Frontier(**{key: np.asarray(row) for key, row in curve.items()}) for name, curve in curves.items()}


def has_curves(config: Mapping[str, Any]) -> bool:
    """Whether a run has SETTINGS, and is evaluated on the curves' openings, the first PROMPTS of the split, or more."""
    is_same = all(config.get(name) == value for name, value in SETTINGS.items())
    return is_same and config.get("eval_prompts", 0) >= PROMPTS


def main() -> None:
    """Samples the reference, and writes the committed curves."""
    prompts = openings(SETTINGS["eval_split"])[:PROMPTS]
    answers = stories_answers(prompts, samples=SAMPLES, max_new_tokens=SETTINGS["max_new_tokens"])
    rewards = np.asarray([sentiment(texts) for texts in answers])
    best, frontier = best_of_n(rewards), attainable_with_errors(rewards)
    curves = {
        "attainable": {"kls": frontier.kls, "rewards": frontier.rewards, "errors": frontier.errors},
        "best of n": {"kls": best.kls, "rewards": best.rewards},
    }
    rounded = {name: {key: np.round(row, 4).tolist() for key, row in curve.items()} for name, curve in curves.items()}
    content = {"settings": {**SETTINGS, "prompts": PROMPTS, "samples": SAMPLES, "reward": "VADER"}, "curves": rounded}
    COMMITTED.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{COMMITTED.name}: the frontier ends at {frontier.kls[-1]:.2f} nats")


def attainable_with_errors(rewards: np.ndarray) -> Frontier:
    """The frontier of `attainable` at every STEP nats, with errors by the jackknife over prompts.

    Args:
        rewards: Of N samples of the reference for each of P prompts, [P, N], with P > 1.
    """
    whole, count = attainable(rewards), len(rewards)
    without = [attainable(np.delete(rewards, i, axis=0)) for i in range(count)]
    kls = np.arange(0.0, min(curve.kls[-1] for curve in (whole, *without)), STEP)
    others = np.stack([np.interp(kls, curve.kls, curve.rewards) for curve in without])
    return Frontier(kls, np.interp(kls, whole.kls, whole.rewards), others.std(axis=0) * (count - 1) ** 0.5)


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


if __name__ == "__main__":
    main()
