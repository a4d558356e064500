"""What can be seen going wrong in the statistics of a policy-optimization step, and what to do about it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


class TrainingDivergedError(FloatingPointError):
    """A statistic that must be finite is not; the weights of the last step can no longer be trusted."""


@dataclass(frozen=True)
class Alert:
    """One condition that holds: `str(alert)` is a line with the number, the threshold and the remedy."""

    name: str  # the metric, under health/
    value: float
    threshold: float
    message: str

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"


def check_finite(stats: Mapping[str, float]) -> None:
    """Raise TrainingDivergedError naming every statistic that is NaN or infinite."""
    broken = [f"{name}={value}" for name, value in stats.items() if not math.isfinite(value)]
    if broken:
        raise TrainingDivergedError(
            f"not finite: {', '.join(broken)}. Resume from the last checkpoint with a lower learning rate or gradient "
            "clipping; with float16 use bfloat16 instead; check that rewards are finite."
        )


def entropy_collapse(entropy: float, start: float, *, least_share: float) -> Alert | None:
    """entropy, start: nats per token, now and at the first check; alert below `least_share` of the start."""
    threshold = least_share * start
    if entropy >= threshold:
        return None
    return Alert(
        "health/entropy_collapse", entropy, threshold,
        f"entropy is {entropy:.4g} nats, below {threshold:.4g} ({least_share:.0%} of the first): the policy stops "
        "exploring. Lower the learning rate, raise the KL coefficient, or add an entropy bonus.",
    )  # fmt: skip


def runaway_kl(kl: float, target: float, *, most_times: float) -> Alert | None:
    """kl, target: nats per response; alert above `most_times` the target."""
    threshold = most_times * target
    if kl <= threshold:
        return None
    return Alert(
        "health/runaway_kl", kl, threshold,
        f"KL to the reference is {kl:.4g}, above {threshold:.4g} ({most_times:g} times the target {target:g}): the "
        "reward may be exploited. Raise the KL coefficient, lower its horizon or the learning rate, and read samples.",
    )  # fmt: skip


def negative_kl(kl: float, *, least: float) -> Alert | None:
    """kl: the sample mean of log-ratios, nats per response; alert below `least`, where chance no longer explains it."""
    if kl >= least:
        return None
    return Alert(
        "health/negative_kl", kl, least,
        f"KL to the reference is {kl:.4g}, below {least:g}: responses are not drawn from the policy that is scored. "
        "Generate with top_k=0, top_p=1, no min_length, no ban on EOS; score at the sampling temperature; "
        "check the padding side and the attention mask.",
    )  # fmt: skip


def clipping(fraction: float, *, most: float) -> Alert | None:
    """fraction: of tokens (or samples) whose ratio is clipped, in [0, 1]."""
    if fraction <= most:
        return None
    return Alert(
        "health/clipping", fraction, most,
        f"{fraction:.1%} of the ratios are clipped, above {most:.1%}: updates are larger than the clip range. "
        "Lower the learning rate or the epochs per batch, or enlarge the batch.",
    )  # fmt: skip


def bad_value_function(explained: Iterable[float], *, least: float) -> Alert | None:
    """explained: explained variance at the last checks (at most 1); alert when each of them is below `least`."""
    best = max(explained)
    if best >= least:
        return None
    return Alert(
        "health/bad_value_function", best, least,
        f"explained variance has not been above {best:.4g}, {least:g} is needed: the value function does worse than a "
        "constant. Raise the value loss coefficient, whiten or scale rewards, give the critic its own warm-up.",
    )  # fmt: skip


def constant_rewards(spread: Iterable[float], *, least: float) -> Alert | None:
    """spread: standard deviations of the scores at the last checks; alert when none is above `least`."""
    widest = max(spread)
    if widest > least:
        return None
    return Alert(
        "health/constant_rewards", widest, least,
        f"the rewards' standard deviation has not been above {widest:.4g}, more than {least:g} is needed: nothing to "
        "learn from. Check the reward function, its truncation, and whether the prompts are too easy or too hard.",
    )  # fmt: skip


def growing_responses(length: float, start: float, *, most_times: float) -> Alert | None:
    """length, start: mean tokens per response, now and at the first check; alert above `most_times` the start."""
    threshold = most_times * start
    if length <= threshold:
        return None
    return Alert(
        "health/growing_responses", length, threshold,
        f"responses have {length:.4g} tokens, above {threshold:.4g} ({most_times:g} times the first): the reward may "
        "favour length, or EOS is not learnt. Check that EOS is scored and not masked; penalize missing EOS or length.",
    )  # fmt: skip


class HealthMonitor:
    """Checks the statistics of every step, and repeats an alert at most every `repeat_after` checks.

    kl_target: nats per response that the KL controller aims at; None leaves runaway KL unchecked.
    entropy_share, length_times: limits relative to the first check.
    kl_times: limit relative to the target. kl_least: nats per response, negative: chance alone gives a little.
    clip_fraction: in [0, 1]. explained_variance, reward_std: limits that all of the last `patience` checks must miss.
    """

    def __init__(
        self,
        *,
        kl_target: float | None = None,
        kl_times: float = 5.0,
        kl_least: float = -1.0,
        entropy_share: float = 0.1,
        clip_fraction: float = 0.3,
        explained_variance: float = -0.5,
        reward_std: float = 1e-6,
        length_times: float = 3.0,
        patience: int = 10,
        repeat_after: int = 50,
    ) -> None:
        self.kl_target, self.kl_times, self.kl_least = kl_target, kl_times, kl_least
        self.entropy_share, self.clip_fraction = entropy_share, clip_fraction
        self.explained_variance, self.reward_std = explained_variance, reward_std
        self.length_times, self.patience, self.repeat_after = length_times, patience, repeat_after
        self._checks = 0
        self._first: dict[str, float] = {}
        self._recent: dict[str, deque[float]] = {}
        self._last_alert: dict[str, int] = {}

    def check(self, stats: Mapping[str, float]) -> list[Alert]:
        """The alerts that are due; statistics that are not there are not checked.

        Raises TrainingDivergedError if any statistic is NaN or infinite.
        """
        check_finite(stats)
        self._checks += 1
        return [alert for alert in self._conditions(stats) if alert is not None and self._is_due(alert.name)]

    def metrics(self, alerts: Iterable[Alert]) -> dict[str, float]:
        """What to log of a check: the value that each alert names, and their count as health/alerts."""
        values = {alert.name: alert.value for alert in alerts}
        return {"health/alerts": float(len(values)), **values}

    def state_dict(self) -> dict[str, Any]:
        recent = {key: list(values) for key, values in self._recent.items()}
        return {
            "checks": self._checks, "first": dict(self._first), "recent": recent, "last_alert": dict(self._last_alert),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._checks, self._first = state["checks"], dict(state["first"])
        self._recent = {key: deque(values, maxlen=self.patience) for key, values in state["recent"].items()}
        self._last_alert = dict(state["last_alert"])

    def _conditions(self, stats: Mapping[str, float]) -> Iterable[Alert | None]:
        if (kl := stats.get("objective/kl")) is not None:
            yield negative_kl(kl, least=self.kl_least)
            if self.kl_target is not None:
                yield runaway_kl(kl, self.kl_target, most_times=self.kl_times)
        if (entropy := stats.get("ppo/policy/entropy")) is not None:
            yield entropy_collapse(entropy, self._start("ppo/policy/entropy", entropy), least_share=self.entropy_share)
        if (fraction := stats.get("ppo/policy/clipfrac")) is not None:
            yield clipping(fraction, most=self.clip_fraction)
        if (explained := self._window("ppo/val/var_explained", stats)) is not None:
            yield bad_value_function(explained, least=self.explained_variance)
        if (spread := self._window("env/reward_std", stats)) is not None:
            yield constant_rewards(spread, least=self.reward_std)
        if (length := stats.get("tokens/responses_len_mean")) is not None:
            start = self._start("tokens/responses_len_mean", length)
            yield growing_responses(length, start, most_times=self.length_times)

    def _start(self, key: str, value: float) -> float:
        return self._first.setdefault(key, value)

    def _window(self, key: str, stats: Mapping[str, float]) -> deque[float] | None:
        """The last `patience` values of a statistic, once there are as many."""
        if key not in stats:
            return None
        window = self._recent.setdefault(key, deque(maxlen=self.patience))
        window.append(stats[key])
        return window if len(window) == self.patience else None

    def _is_due(self, name: str) -> bool:
        due = name not in self._last_alert or self._checks - self._last_alert[name] >= self.repeat_after
        if due:
            self._last_alert[name] = self._checks
        return due
