"""Claims about measured numbers, and the verdicts on them: reproduced, contradicted or undecided."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any, Literal

import numpy as np

from experiments.statistics import LEVEL, Sample, bootstrap, holm, p_of_little, power_of_difference, power_of_little

Numbers = Mapping[int, float | Sequence[float]]
"""seed -> a number, or one number for each prompt, the same prompts for every seed."""
Outcome = Literal["reproduced", "contradicted", "undecided"]
LEAST_SEEDS = 5  # for a verdict: the spread of fewer seeds is hardly known
HEADINGS = ("verdict", "claim", "the paper's number", "obtained (95% interval)", "p, Holm", "seeds", "power")


@dataclass(frozen=True)
class Claim:
    """A claim about one measured quantity, or about the difference of two for the same seeds and prompts.

    Attributes:
        text: The claim in words.
        compared: The name of a quantity; or two names, whose difference (first - second) is the effect.
        kind: more (the effect is above `than`), less (below it), or little (its size is below `matters`).
        matters: The smallest effect that matters, above 0, in the unit. It is the margin of little; for the others, the
            effect for which the power is stated.
        unit: What the numbers are, such as reward or nats.
        origin: paper (as the paper claims it), adapted (to another model, task or size), or ours.
        place: Where the paper has it: section, figure or table; empty if the claim is ours.
        number: The paper's number, in a few words; empty if it has none.
        than: What more and less compare the effect with.
    """

    text: str
    compared: tuple[str] | tuple[str, str]
    kind: Literal["more", "less", "little"]
    matters: float
    unit: str
    origin: Literal["paper", "adapted", "ours"] = "adapted"
    place: str = ""
    number: str = ""
    than: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """What the numbers say about a claim.

    Attributes:
        claim: The claim.
        outcome: reproduced: its p-value after Holm's correction is at most 0.05. contradicted: the same, for the
            opposite. undecided: neither.
        means: The means of the compared quantities.
        effect: The mean effect.
        low: The lower end of the effect's 95% interval; None with one seed or two.
        high: The upper end.
        p: The p-value; None with one seed.
        p_corrected: The same after Holm's correction for all claims of the paper.
        power: The probability to find an effect of `matters` (for little: to find none, if there is none) at the
            observed noise, before the correction; None with one seed.
        seeds: The number of seeds.
    """

    claim: Claim
    outcome: Outcome
    means: tuple[float, ...]
    effect: float
    low: float | None
    high: float | None
    p: float | None
    p_corrected: float | None
    power: float | None
    seeds: int

    def __str__(self) -> str:
        """One line for the screen."""
        return f"{self.outcome:12}  {self.claim.text}   {self.obtained}"

    @property
    def obtained(self) -> str:
        """The effect with its interval, and the means that it compares."""
        text = f"{self.effect:+.3g}"
        if self.low is not None and self.high is not None:
            text += f" ({self.low:+.3g} to {self.high:+.3g})"
        if len(self.means) == 2:
            text += f": {self.means[0]:.3g} against {self.means[1]:.3g}"
        return f"{text} {self.claim.unit}"

    def cells(self) -> tuple[str, ...]:
        """The row of a table under HEADINGS."""
        claim = self.claim
        source = f"{claim.origin}: {claim.place}" if claim.place else claim.origin
        return (
            self.outcome,
            f"{claim.text} ({source})",
            claim.number or "none",
            self.obtained,
            "" if self.p_corrected is None else f"{self.p_corrected:.2g}",
            str(self.seeds),
            "" if self.power is None else f"{self.power:.2f} at {claim.matters:.2g}",
        )


def judge(claims: Iterable[Claim], measured: Mapping[str, Numbers]) -> list[Verdict]:
    """Judges the claims whose quantities were measured, with Holm's correction over all of them.

    The test of a difference is two-sided; a claim of little effect is tested for equivalence, and its opposite for an
    effect beyond the margin. At most one of the two conclusions is false for any true effect, so that both share the
    claim's p-value. With fewer than LEAST_SEEDS seeds a claim is undecided.

    Args:
        claims: The claims of one paper.
        measured: The quantities by name. A claim is judged by the seeds that both of its quantities have; their prompts
            are the same, in the same order.

    Raises:
        ValueError: The quantities of a claim have different numbers of prompts.
    """
    known = [claim for claim in claims if set(claim.compared) <= set(measured) and common_seeds(claim, measured)]
    tables = [[_table(measured[name], common_seeds(claim, measured)) for name in claim.compared] for claim in known]
    effects = [pair[0] - pair[1] if len(pair) == 2 else pair[0] for pair in map(_same_width, tables)]
    samples = [bootstrap(effect) if len(effect) > 1 else None for effect in effects]
    tests = [_test(claim, sample) if sample else None for claim, sample in zip(known, samples, strict=True)]
    corrected = iter(holm([test[0] for test in tests if test]))
    return [
        _verdict(
            claim, [float(table.mean()) for table in pair], effect, sample, test, next(corrected) if test else None
        )
        for claim, pair, effect, sample, test in zip(known, tables, effects, samples, tests, strict=True)
    ]


def _verdict(
    claim: Claim,
    means: Sequence[float],
    effect: np.ndarray,
    sample: Sample | None,
    test: tuple[float, Outcome] | None,
    corrected: float | None,
) -> Verdict:
    common: dict[str, Any] = {
        "claim": claim,
        "means": tuple(means),
        "effect": float(effect.mean()),
        "seeds": len(effect),
    }
    if sample is None or test is None or corrected is None:
        return Verdict(outcome="undecided", low=None, high=None, p=None, p_corrected=None, power=None, **common)
    p, conclusion = test
    low, high = (end if isfinite(end) else None for end in sample.interval())
    power = power_of_little if claim.kind == "little" else power_of_difference
    return Verdict(
        outcome=conclusion if corrected <= LEVEL and sample.seeds >= LEAST_SEEDS else "undecided",
        low=low,
        high=high,
        p=p,
        p_corrected=corrected,
        power=power(sample, claim.matters),
        **common,
    )


def _test(claim: Claim, sample: Sample) -> tuple[float, Outcome]:
    """The p-value of the nearer of two conclusions, and this conclusion."""
    if claim.kind == "little":
        inside, outside = p_of_little(sample, claim.matters)
        return (inside, "reproduced") if inside <= outside else (outside, "contradicted")
    agrees = sample.mean > claim.than if claim.kind == "more" else sample.mean < claim.than
    return sample.p_value(claim.than), "reproduced" if agrees else "contradicted"


def common_seeds(claim: Claim, measured: Mapping[str, Numbers]) -> list[int]:
    """The seeds that all quantities of a claim have, ascending."""
    return sorted(set.intersection(*(set(measured[name]) for name in claim.compared)))


def _table(numbers: Numbers, seeds: Sequence[int]) -> np.ndarray:
    """[S, P]; P is 1 where there is one number for each seed."""
    rows = [np.atleast_1d(np.asarray(numbers[seed], dtype=float)) for seed in seeds]
    if len({len(row) for row in rows}) > 1:
        raise ValueError(
            f"got {[len(row) for row in rows]} numbers for the seeds {list(seeds)}; one for each prompt is needed, the "
            "same prompts for every seed. Evaluate all runs on the same prompts."
        )
    return np.asarray(rows)


def _same_width(tables: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """Averages over the prompts if one of the tables has a single column."""
    widths = {table.shape[1] for table in tables}
    if 1 in widths:
        return [table.mean(1, keepdims=True) for table in tables]
    if len(widths) > 1:
        raise ValueError(
            f"got {sorted(widths)} prompts for the two sides of a claim; the same prompts are needed for both. "
            "Evaluate all runs on the same prompts."
        )
    return tables


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


def from_json(content: Mapping[str, Any]) -> tuple[list[Claim], dict[str, Numbers], list[Verdict]]:
    """The claims, the numbers and the verdicts of `to_json`."""
    measured: dict[str, Numbers] = {
        name: {int(seed): value for seed, value in numbers.items()} for name, numbers in content["measured"].items()
    }
    verdicts = []
    for row in content["verdicts"]:
        claim = Claim(**{**row["claim"], "compared": tuple(row["claim"]["compared"])})
        verdicts.append(Verdict(**{**row, "claim": claim, "means": tuple(row["means"])}))
    return [verdict.claim for verdict in verdicts], measured, verdicts
