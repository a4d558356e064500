"""Checks the numbers of each step against `trimtab_common.conditions`, and stops at numbers that are not finite."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TypedDict

import torch
from torch import Tensor

from trimtab_common.conditions import CONDITIONS, Condition, Sign, Vitals


class TrainingDivergedError(FloatingPointError):
    """A number is NaN or infinite; do not trust the weights after the last step."""


@dataclass(frozen=True)
class Alert:
    """One condition that holds; `str(alert)` is a line with the number, the limit, the cause and the remedy.

    Args:
        name: the metric under which the alert is logged, `health/<condition>`.
        value: the quantity that missed its limit.
        message: number, limit, cause and remedy.
    """

    name: str
    value: float
    message: str

    def __str__(self) -> str:
        return f"{self.name}: {self.message}"


def alert_of(condition: Condition, readings: Sequence[tuple[Sign, Sequence[float], float]]) -> Alert | None:
    """The alert of a condition; None unless the values of every sign are on the wrong side of its limit.

    Args:
        readings: signs, their values at the latest checks, and what their limits are multiples of.
    """
    numbers, words = list[float](), list[str]()
    for sign, values, unit in readings:
        count = math.ceil(sign.share * len(values))
        nearest = sorted(values, reverse=sign.above is not None)[count - 1]
        if sign.above is not None:
            side, limit, is_wrong = "above", sign.above, nearest > sign.above * unit
        else:
            assert sign.below is not None, sign.statistic
            side, limit, is_wrong = "below", sign.below, nearest < sign.below * unit
        if not is_wrong:
            return None
        value = Vitals.__dataclass_fields__[sign.statistic].metadata["words"].format(f"{nearest:.4g}")
        multiple = f" ({limit:g} times the {sign.of})" if sign.of in ("first", "target") else ""
        often = "each" if count == len(values) else count
        lasting = f" at {often} of the last {len(values)} checks" if len(values) > 1 else ""
        numbers.append(nearest)
        words.append(f"{value}, {side} {limit * unit:.4g}{multiple}{lasting}")
    if not words:
        return None
    message = f"{', and '.join(words)}: {condition.cause}. {condition.remedy}"
    return Alert(f"health/{condition.name}", numbers[0], message)


def warn_at_start(condition: Condition, gap: float, *, rounding: float) -> None:
    """Warns if a condition of the first step holds, such as `OTHER_REFERENCE`.

    Args:
        gap: its statistic, nats.
        rounding: nats by which two ways to the same log-probability may differ.
    """
    if alert := alert_of(condition, [(condition.signs[0], [gap], rounding)]):
        warnings.warn(f"step 1: {alert}", stacklevel=6)


def rounding_of(dtype: torch.dtype, *, is_mixed: bool) -> float:
    """The tolerance in nats between two computations of the same log-probability, by the weights' dtype."""
    return 1e-3 if dtype in (torch.float32, torch.float64) and not is_mixed else 0.5


def check_finite(stats: Mapping[str, object]) -> None:
    """Raises TrainingDivergedError that names every number that is NaN or infinite."""
    broken = [f"{name}={n}" for name, n in stats.items() if isinstance(n, Real) and not math.isfinite(n)]
    if broken:
        raise TrainingDivergedError(
            f"not finite: {', '.join(broken)}. Resume from the last checkpoint with a lower learning rate or gradient "
            "clipping; with float16 use bfloat16 instead; check that rewards are finite."
        )


def check_rows(columns: Mapping[str, Tensor], *, what: str) -> None:
    """Raises TrainingDivergedError that names the rows that are not finite, and the first column in which they are not.

    It waits for the device once.

    Args:
        columns: [B, ...] each, floating point, on one device; a column that is computed from others comes after them.
        what: a row, such as "response".
    """
    is_broken = torch.stack([~column.isfinite().reshape(len(column), -1).all(1) for column in columns.values()]).cpu()
    if not bool(is_broken.any()):
        return
    name, rows = next((name, rows) for name, rows in zip(columns, is_broken, strict=True) if bool(rows.any()))
    numbers = rows.nonzero().flatten().tolist()
    raise TrainingDivergedError(
        f"{name} of {what} {', '.join(map(str, numbers[:8]))}{' ...' if len(numbers) > 8 else ''} "
        f"({len(numbers)} of {len(rows)}) are not finite. No update was made. Look at these rows; if all are named, "
        "the weights are broken: resume from the last checkpoint with a lower learning rate, or use bfloat16 in place "
        "of float16."
    )


class MonitorState(TypedDict):
    """What a `HealthMonitor` remembers between checks, by the names of the fields of `Vitals`."""

    checks: int
    first: dict[str, float]
    recent: dict[str, list[float]]
    last_alert: dict[str, int]


class HealthMonitor:
    """Checks the vitals of every step against `CONDITIONS`; repeats an alert at most every `repeat_after` checks.

    Args:
        kl_target: nats per response that the KL controller aims at; None leaves conditions on it unchecked.
        patience: checks that a slow sign must last.
        repeat_after: checks after which a condition that still holds is reported again.
    """

    def __init__(self, *, kl_target: float | None = None, patience: int = 10, repeat_after: int = 50) -> None:
        self.kl_target, self.patience, self.repeat_after = kl_target, patience, repeat_after
        self._longest = max(patience, 1) * max(
            sign.slow or 1 for condition in CONDITIONS for sign in (*condition.signs, *condition.or_signs)
        )
        self._state = MonitorState(checks=0, first={}, recent={}, last_alert={})

    def check(self, vitals: Vitals, stats: Mapping[str, object] = {}) -> list[Alert]:
        """Checks one step, and returns the alerts to show now.

        Args:
            vitals: the quantities that the conditions are about.
            stats: other statistics, which must be finite and are not judged further.

        Raises:
            TrainingDivergedError: a statistic or a vital is NaN or infinite.
        """
        values: dict[str, float] = {name: value for name, value in vars(vitals).items() if value is not None}
        check_finite({**stats, **values})
        state, recent = self._state, self._state["recent"]
        state["checks"] += 1
        state["first"] = {**values, **state["first"]}
        state["recent"] = {name: [*recent.get(name, []), value][-self._longest :] for name, value in values.items()}
        due: list[Alert] = []
        for condition in CONDITIONS:
            alert = self._alert(condition, condition.signs) or self._alert(condition, condition.or_signs)
            if alert is None:
                continue
            last = state["last_alert"].get(alert.name)
            if last is None or state["checks"] - last >= self.repeat_after:
                state["last_alert"][alert.name] = state["checks"]
                due.append(alert)
        return due

    def report(self, vitals: Vitals, stats: Mapping[str, object] = {}, *, when: str, warns: bool) -> dict[str, float]:
        """Warns of what `check` finds.

        Args:
            when: the step's name, for the warnings.
            warns: whether this process warns.

        Returns:
            What to log: `health/alerts`, the number of alerts, and the value that each alert is about.

        Raises:
            TrainingDivergedError: see `check`.
        """
        alerts = self.check(vitals, stats)
        for alert in alerts if warns else ():
            warnings.warn(f"{when}: {alert}", stacklevel=4)
        return {"health/alerts": float(len(alerts)), **{alert.name: alert.value for alert in alerts}}

    def state_dict(self) -> MonitorState:
        """What the next check depends on."""
        return copy.deepcopy(self._state)

    def load_state_dict(self, state: MonitorState) -> None:
        """Restores what `state_dict` returned."""
        self._state = copy.deepcopy(state)

    def _alert(self, condition: Condition, signs: Sequence[Sign]) -> Alert | None:
        readings, first, seen = list[tuple[Sign, Sequence[float], float]](), self._state["first"], self._state["recent"]
        for sign in signs:
            if sign.may_lack and sign.statistic not in seen:
                continue
            checks = max(sign.slow * self.patience, 1)
            recent = seen.get(sign.statistic, [])[-checks:]
            unit = {None: 1.0, "first": first.get(sign.statistic), "target": self.kl_target}[sign.of]
            if unit is None or len(recent) < checks:
                return None
            readings.append((sign, recent, unit))
        return alert_of(condition, readings)
