"""Whether the trainers still learn as they did: `make gate`, before a release.

The sweeps gate*.yaml repeat a part of the runs whose archives are committed, with the same settings and seeds. This
program runs them, and asks two questions about each of five effects that are known: does the judge still find it, and
has it changed? A change is tested between the new runs and the committed ones, in pairs of seeds. Where the processor
and the versions are the same, the numbers are the same to the bit. Elsewhere they differ by chance: the test of a
change stops a release without a fault in one case of a hundred at most, and an effect that the judge misses by chance
stops it, too. The exit status is 1 if an effect is lost or has changed, or a run has failed. Finished runs in
runs/reproduce/gate are not repeated: remove that folder first.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from scipy.stats import t as student

from experiments.claims import AGREES, Claim, Numbers, Verdict, common_seeds, judge
from experiments.provenance import ROOT
from experiments.reproduce import papers, run
from experiments.run_folders import ARCHIVE, Run, finished_runs, unpacked
from experiments.statistics import Sample, holm, sample_of

TIER = "gate"
EFFECTS = {
    "huang_2024_details": (
        "the recipe: the reward rises",
        "log-probabilities at the wrong temperature: more KL",
    ),
    "rafailov_2023_dpo_frontier": ("within 4 nats DPO gets more reward than SFT on the chosen",),
    "zheng_2025_nft": (
        "Flow-GRPO raises warmth above its control without a reward",
        "DRaFT-1 raises warmth above its control without a reward",
    ),
}
"""The claims by paper: PPO, PPO's KL, DPO and SFT, Flow-GRPO by DDPOTrainer, and AlignPropTrainer."""
LEVEL = 0.01  # of all false alarms about a change
CHANCE = 0.8  # with which a change of the size that is told would be found


@dataclass(frozen=True)
class Effect:
    """A known effect, measured again.

    Attributes:
        paper: The folder of the experiment.
        verdict: The judge's, on the new runs.
        before: The mean effect in the committed runs with the same seeds.
        change: The new effect of each seed minus the committed one.
        p: The p-value of no change, corrected by Holm's rule.
    """

    paper: str
    verdict: Verdict
    before: float
    change: Sample
    p: float

    @property
    def has_passed(self) -> bool:
        """Whether the judge finds the effect, and no change of it."""
        return self.p > LEVEL and self.verdict.outcome == AGREES[self.verdict.claim.origin]

    def __str__(self) -> str:
        """One line for the screen."""
        words = f"{self.verdict}; committed {self.before:+.3g}, "
        if self.change.error == 0 and self.change.mean == 0:
            return f"{words}the same to the bit"
        least = self.change.error * (
            student.isf(LEVEL / 2, self.change.freedom) + student.ppf(CHANCE, self.change.freedom)
        )
        has_changed = "CHANGED" if self.p <= LEVEL else "no change is seen"
        return f"{words}{has_changed} (p {self.p:.2g}; {CHANCE:.0%} to find {least:.2g})"


def counterparts(new: Sequence[Run], committed: Sequence[Run]) -> list[Run]:
    """The committed run of each new one: that with the same seed and the same settings, of those that both have.

    Raises:
        ValueError: A new run has no counterpart, or several.
    """

    def matches(run: Run, other: Run) -> bool:
        names = run.settings.keys() & other.settings.keys()
        return all(run.config[name] == other.config[name] for name in (*names, "seed"))

    found = [[other for other in committed if matches(run, other)] for run in new]
    if strange := [run.folder for run, others in zip(new, found, strict=True) if len(others) != 1]:
        raise ValueError(
            f"{len(strange)} runs, such as {strange[0]}, have no counterpart among the committed runs, or several; one "
            "is needed. gate*.yaml must have the settings of night*.yaml: correct it, or commit new runs."
        )
    return [others[0] for others in found]


def effects(pairs: Mapping[str, tuple[Sequence[Run], Sequence[Run]]]) -> list[Effect]:
    """Judges the known effects by the new runs, and compares these with the committed ones.

    Args:
        pairs: paper -> its new runs and their counterparts.
    """
    claims, papers_of = list[Claim](), list[str]()
    new, old = dict[str, Numbers](), dict[str, Numbers]()
    for paper, (runs, committed) in pairs.items():
        read = import_module(f"experiments.{paper}.report").read
        reports = read(runs), read(committed)
        for numbers, report in zip((new, old), reports, strict=True):
            numbers |= {f"{paper}: {name}": values for name, values in report.measured.items()}
        for claim in reports[0].claims:
            if claim.text in EFFECTS[paper]:
                claims.append(replace(claim, compared=tuple(f"{paper}: {name}" for name in claim.compared)))
                papers_of.append(paper)
    verdicts = judge(claims, new)
    before = [effect_of_seeds(claim, old) for claim in claims]
    changes = [sample_of(effect_of_seeds(claim, new) - then) for claim, then in zip(claims, before, strict=True)]
    p_values = holm([change.p_value(0.0) for change in changes])
    rows = zip(papers_of, verdicts, map(np.mean, before), changes, p_values, strict=True)
    return [Effect(paper, verdict, float(mean), change, p) for paper, verdict, mean, change, p in rows]


def effect_of_seeds(claim: Claim, measured: Mapping[str, Numbers]) -> np.ndarray:
    """The mean effect over the prompts of each seed, [S]."""
    sides = [[np.mean(measured[name][seed]) for seed in common_seeds(claim, measured)] for name in claim.compared]
    return np.subtract(*sides) if len(sides) == 2 else np.asarray(sides[0])


def main() -> int:
    """Returns 0 if all known effects are found again, unchanged."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("papers", nargs="*", help=f"folders of experiments (default: {', '.join(EFFECTS)})")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default 2)")
    arguments = parser.parse_args()
    if unknown := set(arguments.papers) - set(papers(TIER)):
        parser.error(f"unknown: {', '.join(sorted(unknown))}. The tier {TIER} has {', '.join(papers(TIER))}.")
    os.chdir(ROOT)  # sweeps name their programs from here
    done = [run(paper, TIER, arguments.jobs) for paper in arguments.papers or papers(TIER)]
    failures = [f"{each.paper}: {failure}" for each in done for failure in each.failures]
    print(*(f"failed  {failure}" for failure in failures), sep="\n")
    if failures:
        return 1
    with TemporaryDirectory() as place:
        pairs = {}
        for each in done:
            runs = finished_runs(*map(Path, each.folders))
            archive = ROOT / "experiments" / each.paper / f"night_{ARCHIVE}"
            pairs[each.paper] = runs, counterparts(runs, finished_runs(unpacked(archive, Path(place, each.paper))))
        found = effects(pairs)
    print(*found, f"{sum(each.minutes for each in done):.0f} minutes", sep="\n")
    return 0 if all(effect.has_passed for effect in found) else 1


if __name__ == "__main__":
    sys.exit(main())
