"""Checks what commonly goes wrong in a policy-optimization step, and says how to fix it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TypedDict


class TrainingDivergedError(FloatingPointError):
    """A statistic that must be finite is not; the weights of the last step can no longer be trusted."""


@dataclass(frozen=True)
class Vitals:
    """The quantities of one step that `HealthMonitor` judges; None leaves a quantity unchecked.

    Args:
        kl: KL(policy, reference), the mean of the sampled log-ratios, nats per response.
        entropy: of the policy, nats per token.
        clip_fraction: share of the ratios that are clipped, in [0, 1].
        explained_variance: of the value function, at most 1.
        reward_std: standard deviation of the scores, in the unit of the reward.
        response_length: mean tokens per response.
    """

    kl: float | None = None
    entropy: float | None = None
    clip_fraction: float | None = None
    explained_variance: float | None = None
    reward_std: float | None = None
    response_length: float | None = None


@dataclass(frozen=True)
class Alert:
    """One condition that holds; `str(alert)` is a line with the number, the threshold and the remedy.

    Args:
        name: the metric under which the alert is logged, `health/<condition>`.
        value: the quantity that missed its limit.
        threshold: the limit.
        message: number, limit and remedy.
    """

    name: str
    value: float
    threshold: float
    message: str

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"


class MonitorState(TypedDict):
    """What a `HealthMonitor` remembers between checks, by the names of the fields of `Vitals`."""

    checks: int
    first: dict[str, float]
    recent: dict[str, list[float]]
    last_alert: dict[str, int]


def check_finite(stats: Mapping[str, float]) -> None:
    """Raises TrainingDivergedError that names every statistic that is NaN or infinite."""
    broken = [f"{name}={value}" for name, value in stats.items() if not math.isfinite(value)]
    if broken:
        raise TrainingDivergedError(
            f"not finite: {', '.join(broken)}. Resume from the last checkpoint with a lower learning rate or gradient "
            "clipping; with float16 use bfloat16 instead; check that rewards are finite."
        )


def entropy_collapse(entropy: float, start: float, *, least_share: float) -> Alert | None:
    """Alerts when the entropy is below a share of the first.

    Args:
        entropy: nats per token.
        start: the entropy at the first check.
        least_share: of the start, in [0, 1].
    """
    threshold = least_share * start
    if entropy >= threshold:
        return None
    return Alert(
        "health/entropy_collapse",
        entropy,
        threshold,
        f"entropy is {entropy:.4g} nats, below {threshold:.4g} ({least_share:.0%} of the first): the policy stops "
        "exploring. Lower the learning rate, raise the KL coefficient, or add an entropy bonus.",
    )


def runaway_kl(kl: float, target: float, *, most_times: float) -> Alert | None:
    """Alerts when the KL is above `most_times` the target; both in nats per response."""
    threshold = most_times * target
    if kl <= threshold:
        return None
    return Alert(
        "health/runaway_kl",
        kl,
        threshold,
        f"KL to the reference is {kl:.4g}, above {threshold:.4g} ({most_times:g} times the target {target:g}): the "
        "reward may be exploited. Raise the KL coefficient, lower its horizon or the learning rate, and read samples.",
    )


def negative_kl(kl: float, *, least: float) -> Alert | None:
    """Alerts when the mean log-ratio, in nats per response, is below what sampling noise explains."""
    if kl >= least:
        return None
    return Alert(
        "health/negative_kl",
        kl,
        least,
        f"KL to the reference is {kl:.4g}, below {least:g}: responses are not drawn from the policy that is scored. "
        "Generate with top_k=0, top_p=1, no min_length, no ban on EOS; score at the sampling temperature; "
        "check the padding side and the attention mask.",
    )


def clipping(fraction: float, *, most: float) -> Alert | None:
    """Alerts when the share of clipped ratios, in [0, 1], is above `most`."""
    if fraction <= most:
        return None
    return Alert(
        "health/clipping",
        fraction,
        most,
        f"{fraction:.1%} of the ratios are clipped, above {most:.1%}: updates are larger than the clip range. "
        "Lower the learning rate or the epochs per batch, or enlarge the batch.",
    )


def bad_value_function(explained: Iterable[float], *, least: float) -> Alert | None:
    """Alerts when the explained variance, at most 1, was below `least` at each of the last checks."""
    best = max(explained)
    if best >= least:
        return None
    return Alert(
        "health/bad_value_function",
        best,
        least,
        f"explained variance has not been above {best:.4g}, {least:g} is needed: the value function does worse than a "
        "constant. Raise the value loss coefficient, whiten or scale rewards, give the critic its own warm-up.",
    )


def constant_rewards(spread: Iterable[float], *, least: float) -> Alert | None:
    """Alerts when the standard deviation of the scores was at most `least` at each of the last checks."""
    widest = max(spread)
    if widest > least:
        return None
    return Alert(
        "health/constant_rewards",
        widest,
        least,
        f"the rewards' standard deviation has not been above {widest:.4g}, more than {least:g} is needed: nothing to "
        "learn from. Check the reward function, its truncation, and whether the prompts are too easy or too hard.",
    )


def growing_responses(length: float, start: float, *, most_times: float) -> Alert | None:
    """Alerts when the mean tokens per response are above `most_times` those of the first check."""
    threshold = most_times * start
    if length <= threshold:
        return None
    return Alert(
        "health/growing_responses",
        length,
        threshold,
        f"responses have {length:.4g} tokens, above {threshold:.4g} ({most_times:g} times the first): the reward may "
        "favour length, or EOS is not learnt. Check that EOS is scored and not masked; penalize missing EOS or length.",
    )


class HealthMonitor:
    """Checks the vitals of every step, and repeats an alert at most every `repeat_after` checks.

    Args:
        kl_target: nats per response that the KL controller aims at; None leaves runaway KL unchecked.
        kl_times: largest KL, in multiples of the target.
        kl_least: smallest KL, nats per response; negative, because sampling noise alone gives a little.
        entropy_share: smallest entropy, as a share of the first check's.
        clip_fraction: largest share of clipped ratios, in [0, 1].
        explained_variance: limit that all of the last `patience` checks must miss.
        reward_std: limit that all of the last `patience` checks must miss, in the unit of the reward.
        length_times: largest mean response length, in multiples of the first check's.
        patience: checks that a slow condition must last.
        repeat_after: checks after which a condition that still holds is reported again.
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

    def check(self, vitals: Vitals, stats: Mapping[str, float] = {}) -> list[Alert]:
        """Judges one step.

        Args:
            vitals: the quantities that the conditions are about.
            stats: other statistics, which must be finite and are not judged further.

        Returns:
            The alerts that are due.

        Raises:
            TrainingDivergedError: a statistic or a vital is NaN or infinite.
        """
        check_finite(stats)
        check_finite({name: value for name, value in asdict(vitals).items() if value is not None})
        self._checks += 1
        return [alert for alert in self._conditions(vitals) if alert is not None and self._is_due(alert.name)]

    def metrics(self, alerts: Iterable[Alert]) -> dict[str, float]:
        """What to log of a check: the value that each alert names, and their count as health/alerts."""
        values = {alert.name: alert.value for alert in alerts}
        return {"health/alerts": float(len(values)), **values}

    def state_dict(self) -> MonitorState:
        """What the next check depends on."""
        return {
            "checks": self._checks,
            "first": dict(self._first),
            "recent": {name: list(values) for name, values in self._recent.items()},
            "last_alert": dict(self._last_alert),
        }

    def load_state_dict(self, state: MonitorState) -> None:
        """Restores what `state_dict` returned."""
        self._checks, self._first = state["checks"], dict(state["first"])
        self._recent = {name: deque(values, maxlen=self.patience) for name, values in state["recent"].items()}
        self._last_alert = dict(state["last_alert"])

    def _conditions(self, vitals: Vitals) -> Iterator[Alert | None]:
        if vitals.kl is not None:
            yield negative_kl(vitals.kl, least=self.kl_least)
            if self.kl_target is not None:
                yield runaway_kl(vitals.kl, self.kl_target, most_times=self.kl_times)
        if vitals.entropy is not None:
            start = self._first.setdefault("entropy", vitals.entropy)
            yield entropy_collapse(vitals.entropy, start, least_share=self.entropy_share)
        if vitals.clip_fraction is not None:
            yield clipping(vitals.clip_fraction, most=self.clip_fraction)
        if (explained := self._window("explained_variance", vitals.explained_variance)) is not None:
            yield bad_value_function(explained, least=self.explained_variance)
        if (spread := self._window("reward_std", vitals.reward_std)) is not None:
            yield constant_rewards(spread, least=self.reward_std)
        if vitals.response_length is not None:
            start = self._first.setdefault("response_length", vitals.response_length)
            yield growing_responses(vitals.response_length, start, most_times=self.length_times)

    def _window(self, name: str, value: float | None) -> deque[float] | None:
        """The last `patience` values of a quantity, once there are as many."""
        if value is None:
            return None
        window = self._recent.setdefault(name, deque(maxlen=self.patience))
        window.append(value)
        return window if len(window) == self.patience else None

    def _is_due(self, name: str) -> bool:
        due = name not in self._last_alert or self._checks - self._last_alert[name] >= self.repeat_after
        if due:
            self._last_alert[name] = self._checks
        return due
