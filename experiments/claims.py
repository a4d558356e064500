"""Claims about measured numbers, and the verdicts on them. STATISTICS.md describes how they are reached."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from experiments.statistics import (
    DIGITS,
    LEVEL,
    Sample,
    holm,
    holm_levels,
    p_of_little,
    power_of_difference,
    power_of_little,
    sample_of,
)

Numbers = Mapping[int, float | Sequence[float]]
"""seed -> a number, or one number for each prompt, the same prompts for every seed."""
Origin = Literal["paper", "adapted", "ours"]
Outcome = Literal[
    "reproduced", "contradicted", "does not carry over", "holds", "does not hold", "no effect that matters", "undecided"
]
AGREES: dict[Origin, Outcome] = {"paper": "reproduced", "adapted": "reproduced", "ours": "holds"}
DISAGREES: dict[Origin, Outcome] = {"paper": "contradicted", "adapted": "does not carry over", "ours": "does not hold"}
LEAST_SEEDS = 8  # for a verdict: the spread of fewer seeds is hardly known
LEAST_GROUPS = 4  # of prompts, where they come in groups: with fewer the test errs too often
HEADINGS = (
    "verdict",
    "claim",
    "the paper's number",
    "obtained (95% interval)",
    "p, Holm",
    "seeds that agree",
    "chance to find the least effect that matters",
)


@dataclass(frozen=True)
class Claim:
    """A claim about one measured quantity, or about the difference of two for the same seeds and prompts.

    Attributes:
        text: The claim in words.
        compared: The name of a quantity; or two names, whose difference (first - second) is the effect.
        kind: more (the effect is above `than`), less (below it), or little (its size is below `matters`).
        matters: The smallest effect that matters, above 0, in the unit: margins.yaml has it.
        unit: What the numbers are, such as reward or nats.
        origin: paper (the paper's task and size), adapted (to another model, task or size), or ours.
        place: Where the paper has it: section, figure or table; empty if the claim is ours.
        number: The paper's number, in a few words, from the paper itself; empty if we know none.
        than: What more and less compare the effect with.
        trivial: Why the claim does not inform, such as "the reward is optimised"; empty if it does. A trivial claim is
            a check: it is listed apart and not counted, but it stays in Holm's correction.
        scale: What an adapted claim was tried on, such as "15M parameters".
        groups: The group of each prompt, such as its colour, where prompts come in groups; see `sample_of`.
    """

    text: str
    compared: tuple[str] | tuple[str, str]
    kind: Literal["more", "less", "little"]
    matters: float
    unit: str
    origin: Origin = "adapted"
    place: str = ""
    number: str = ""
    than: float = 0.0
    trivial: str = ""
    scale: str = ""
    groups: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What the numbers say about a claim.

    Attributes:
        claim: The claim.
        outcome: One of the conclusions if its p-value after Holm's correction is at most 0.05, else undecided.
            The claim is true: reproduced, or holds if the claim is ours. Its opposite is true: contradicted for a claim
            of the paper, does not carry over for an adapted one, does not hold for ours. The effect is smaller than
            `matters`, and `than` is 0: no effect that matters; for a claim of little effect that is its truth.
        means: The means of the compared quantities.
        effect: The mean effect.
        coverage: What the interval covers: 0.95; 0.9 if the p-value is that of a test of equivalence, which concludes
            at 0.05 where this interval is within the margin.
        low: The lower end of the effect's interval; None with one seed.
        high: The upper end.
        p: The p-value of the nearest conclusion; None with one seed.
        p_corrected: The same after Holm's correction for all claims that are judged with it.
        power: The probability that this test, at the level that Holm's rule and the paper's other claims leave to it,
            finds an effect of `matters` (for little: finds none, if there is none) at the observed noise; 0 with too
            few seeds or groups for a verdict; None with one seed.
        agree: The number of seeds whose effect is on the same side as the mean effect, within or beyond the margin if
            equivalence is tested.
        seeds: The number of seeds.
    """

    claim: Claim
    outcome: Outcome
    means: tuple[float, ...]
    effect: float
    coverage: float
    low: float | None
    high: float | None
    p: float | None
    p_corrected: float | None
    power: float | None
    agree: int
    seeds: int

    def __str__(self) -> str:
        """One line for the screen."""
        return f"{self.outcome:12}  {self.claim.text}   {self.obtained}"

    @property
    def words(self) -> str:
        """The outcome, with the scale that an adapted claim does not carry over to."""
        if self.outcome == "does not carry over" and self.claim.scale:
            return f"{self.outcome} to {self.claim.scale}"
        return self.outcome

    @property
    def obtained(self) -> str:
        """The effect with its interval, and the means that it compares."""
        text = f"{self.effect:+.3g}"
        if self.low is not None and self.high is not None:
            of = "" if self.coverage == 1 - LEVEL else f"{self.coverage:.0%}: "
            text += f" ({of}{self.low:+.3g} to {self.high:+.3g})"
        if len(self.means) == 2:
            text += f": {self.means[0]:.3g} against {self.means[1]:.3g}"
        return f"{text} {self.claim.unit}"

    @property
    def chance(self) -> str:
        """The power in words."""
        if self.power is None:
            return ""
        matters = f"{self.claim.matters:.2g}"
        return (
            f"{self.power:.0%} to show less than {matters}"
            if self.claim.kind == "little"
            else f"{self.power:.0%} to find {matters}"
        )

    def cells(self) -> tuple[str, ...]:
        """The row of a table under HEADINGS."""
        claim = self.claim
        source = f"{claim.origin}: {claim.place}" if claim.place else claim.origin
        return (
            self.words,
            f"{claim.text} ({source})",
            claim.number or ("" if claim.origin == "ours" else "no number known to us"),
            self.obtained,
            "" if self.p_corrected is None else f"{self.p_corrected:.2g}",
            f"{self.agree} of {self.seeds}",
            self.chance,
        )


def judge(claims: Iterable[Claim], measured: Mapping[str, Numbers]) -> list[Verdict]:
    """Judges the claims whose quantities were measured, with Holm's correction over all of them.

    The conclusions on a claim are that its effect is above `than`, that it is below, and, where `than` is 0, that it is
    smaller than `matters`; on a claim of little effect, that its size is below `matters`, and that it is above. The
    conclusion with the smallest p-value is drawn, and all conclusions share the claim's p-value: at a true effect of 0
    a false one has at most the probability of the level. With fewer than LEAST_SEEDS seeds, or with fewer than
    LEAST_GROUPS groups of prompts where these come in groups, a claim is undecided.

    Args:
        claims: The claims of one page.
        measured: The quantities by name. A claim is judged by the seeds that both of its quantities have; their prompts
            are the same, in the same order.

    Raises:
        ValueError: The quantities of a claim have different numbers of prompts, or numbers that are not finite.
    """
    known = [claim for claim in claims if set(claim.compared) <= set(measured) and common_seeds(claim, measured)]
    tables = [_tables(claim, measured) for claim in known]
    effects = [_effect(_same_width(claim, pair)) for claim, pair in zip(known, tables, strict=True)]
    samples = [
        sample_of(effect, claim.groups) if len(effect) > 1 else None
        for claim, effect in zip(known, effects, strict=True)
    ]
    tests = [_test(claim, sample) if sample else None for claim, sample in zip(known, samples, strict=True)]
    p_values = [test[0] for test in tests if test]
    corrections = iter(zip(holm(p_values), holm_levels(p_values), strict=True))
    return [
        _verdict(
            claim, [float(table.mean()) for table in pair], effect, sample, test, next(corrections) if test else None
        )
        for claim, pair, effect, sample, test in zip(known, tables, effects, samples, tests, strict=True)
    ]


def _verdict(
    claim: Claim,
    means: Sequence[float],
    effect: np.ndarray,
    sample: Sample | None,
    test: tuple[float, Outcome, bool] | None,
    correction: tuple[float, float] | None,
) -> Verdict:
    is_equivalence = claim.kind == "little" or (test is not None and test[2])
    common: dict[str, Any] = {
        "claim": claim,
        "means": tuple(means),
        "effect": float(effect.mean()),
        "coverage": 1 - (2 * LEVEL if is_equivalence else LEVEL),
        "agree": _agreeing(claim, effect.mean(1), is_equivalence=is_equivalence),
        "seeds": len(effect),
    }
    if sample is None or test is None or correction is None:
        return Verdict(outcome="undecided", low=None, high=None, p=None, p_corrected=None, power=None, **common)
    corrected, level = correction
    low, high = sample.interval(1 - common["coverage"])
    is_enough = sample.seeds >= LEAST_SEEDS and not 0 < len(set(claim.groups)) < LEAST_GROUPS
    power = power_of_little if claim.kind == "little" else power_of_difference
    return Verdict(
        outcome=test[1] if corrected <= LEVEL and is_enough else "undecided",
        low=low,
        high=high,
        p=test[0],
        p_corrected=corrected,
        power=power(sample, claim.matters, level) if is_enough else 0.0,
        **common,
    )


def _test(claim: Claim, sample: Sample) -> tuple[float, Outcome, bool]:
    """The p-value of the nearest conclusion, this conclusion, and whether it is one of equivalence."""
    agrees, disagrees = AGREES[claim.origin], DISAGREES[claim.origin]
    inside, outside = p_of_little(replace(sample, mean=sample.mean - claim.than), claim.matters)
    if claim.kind == "little":
        return (inside, agrees, True) if inside <= outside else (outside, disagrees, True)
    p = sample.p_value(claim.than)
    if inside < p and not claim.than:  # near a threshold that is not 0, to be close to it is no finding
        return inside, "no effect that matters", True
    return p, agrees if (sample.mean > claim.than) == (claim.kind == "more") else disagrees, False


def _agreeing(claim: Claim, of_seeds: np.ndarray, *, is_equivalence: bool) -> int:
    """How many seeds are on the same side as their mean."""
    distances = of_seeds - claim.than
    if is_equivalence:
        is_inside = abs(distances.mean()) < claim.matters
        return int(((abs(distances) < claim.matters) == is_inside).sum())
    return int((distances * distances.mean() > 0).sum())


def common_seeds(claim: Claim, measured: Mapping[str, Numbers]) -> list[int]:
    """The seeds that all quantities of a claim have, ascending."""
    return sorted(set.intersection(*(set(measured[name]) for name in claim.compared)))


def _tables(claim: Claim, measured: Mapping[str, Numbers]) -> list[np.ndarray]:
    """The numbers of the claim's quantities, each [S, P], for the seeds that all of them have."""
    seeds = common_seeds(claim, measured)
    return [_table(name, measured[name], seeds) for name in claim.compared]


def _table(name: str, numbers: Numbers, seeds: Sequence[int]) -> np.ndarray:
    """[S, P]; P is 1 where there is one number for each seed."""
    rows = [np.atleast_1d(np.asarray(numbers[seed], dtype=float)) for seed in seeds]
    if len({len(row) for row in rows}) > 1:
        raise ValueError(
            f"{name}: got {[len(row) for row in rows]} numbers for the seeds {list(seeds)}; one for each prompt is "
            "needed, the same prompts for every seed. Evaluate all runs on the same prompts."
        )
    if broken := [seed for seed, row in zip(seeds, rows, strict=True) if not (len(row) and np.isfinite(row).all())]:
        raise ValueError(
            f"{name}: got no number, or one that is not finite, for the seeds {broken}; finite numbers are needed. "
            "Leave out the runs of these seeds, and say so."
        )
    return np.asarray(rows)


def _same_width(claim: Claim, tables: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """Averages over the prompts if one of the tables has a single column."""
    widths = {table.shape[1] for table in tables}
    if 1 in widths:
        return [table.mean(1, keepdims=True) for table in tables]
    if len(widths) > 1:
        raise ValueError(
            f"{claim.text}: got {sorted(widths)} prompts for the two sides; the same prompts are needed for both. "
            "Evaluate all runs on the same prompts."
        )
    return tables


def _effect(tables: Sequence[np.ndarray]) -> np.ndarray:
    """The first table less the second; differences that are equal but for errors of arithmetic are made equal."""
    effect = tables[0] - tables[1] if len(tables) == 2 else tables[0]
    largest = max(float(np.abs(table).max()) for table in tables)
    if largest == 0 or np.ptp(effect) > largest / 10**DIGITS:
        return effect
    return np.round(effect, DIGITS - math.ceil(math.log10(largest)))


def rounded(measured: Mapping[str, Numbers]) -> dict[str, dict[int, float | list[float]]]:
    """The numbers with six significant digits, which is how a file holds them and how they are judged."""

    def short(value: float) -> float:
        return float(f"{value:.6g}")

    return {
        name: {
            int(seed): short(value) if isinstance(value, int | float) else [short(float(number)) for number in value]
            for seed, value in numbers.items()
        }
        for name, numbers in measured.items()
    }


def to_json(measured: Mapping[str, Numbers], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The content of a file from which `from_json` and `judge` give the same verdicts."""
    return {"verdicts": [asdict(verdict) for verdict in verdicts], "measured": measured}


def write_numbers(file: Path, content: Mapping[str, Any]) -> None:
    """Writes `to_json`'s content, and what goes with it, as JSON with a list of numbers in each line."""
    text = json.dumps(content, indent=1)
    text = re.sub(r"\[\s+([^][{}\"]+?)\s+\]", lambda match: f"[{' '.join(match[1].split())}]", text)
    file.write_text(f"{text}\n", encoding="utf-8")


def from_json(content: Mapping[str, Any]) -> tuple[list[Claim], dict[str, Numbers], list[Verdict]]:
    """The claims, the numbers and the verdicts of `to_json`."""
    measured: dict[str, Numbers] = {
        name: {int(seed): value for seed, value in numbers.items()} for name, numbers in content["measured"].items()
    }
    verdicts = []
    for row in content["verdicts"]:
        lists = {name: tuple(row["claim"][name]) for name in ("compared", "groups")}
        claim = Claim(**{**row["claim"], **lists})
        verdicts.append(Verdict(**{**row, "claim": claim, "means": tuple(row["means"])}))
    return [verdict.claim for verdict in verdicts], measured, verdicts
