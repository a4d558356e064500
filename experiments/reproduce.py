"""Runs the papers' experiments and judges their claims: `make reproduce`.

A tier is a size: smoke (minutes, shows that everything runs and decides nothing), default (90 minutes on two cores),
night, gpu, and gate, which gate.py reads. For each paper this program runs the sweeps of the tier, such as
experiments/<paper>/reproduce*.yaml (see TIERS), and then report.py over their runs, while the next paper's sweeps
begin. It does not repeat runs in runs/reproduce/<tier> that have finished; remove that folder to start over. Without a
GPU, the runs of a sweep are forked from one process that has imported their libraries. The default tier writes the
verdicts, the figures and the numbers into each paper's folder, and so does the night tier where the paper's README
has its marks; the others leave their pages in runs/reproduce. experiments/README.md has the verdicts of the largest
tier that is committed. With --judge-again it runs nothing: it judges the committed claims by the committed numbers,
and writes verdicts and tables.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from experiments import claims
from experiments.claims import AGREES, DISAGREES, HEADINGS, Origin, Verdict, from_json, to_json, write_numbers
from experiments.provenance import ROOT
from experiments.reports import CHECKS, HOW, MARKDOWN, NUMBERS, WHY, markdown, tables
from experiments.run_folders import ARCHIVE
from trimtab_cli.sweep.runner import log_of
from trimtab_cli.sweep.spec import SweepError
from trimtab_cli.sweep.study import read_study, trials_of

RUNS = Path("runs", "reproduce")
TIERS = {
    "smoke": "smoke*.yaml",
    "default": "reproduce*.yaml",
    "night": "night*.yaml",
    "gpu": "sweep_gpu*.yaml",
    "gate": "gate*.yaml",
}
ORIGINS: dict[Origin, str] = {
    "paper": "the paper's, on its task and at its size",
    "adapted": "the paper's, adapted to another model, task or size",
    "ours": "ours",
}
COMMITTED = {"default": "", "night": "night_"}
"""The tiers whose results are committed, the smallest first, and how the names of their files begin."""
# glibc keeps what a run frees: to return it and to ask for it again takes a run a tenth of its time.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
# A sweep imports these once for all its runs: most of a run's imports that a fork can share.
PRELOADED = (
    *("accelerate", "matplotlib.pyplot", "pandas", "peft", "scipy.stats", "transformers.models.llama.modeling_llama"),
    "diffusers.models.autoencoders.autoencoder_kl",
)


@dataclass(frozen=True)
class Result:
    """The result of a paper: the folder of its page, its verdicts, what failed, and the minutes that it took."""

    paper: str
    tier: str
    folder: Path
    verdicts: Sequence[Verdict]
    failures: Sequence[str]
    minutes: float


def papers(*tiers: str) -> list[str]:
    """The folders with sweeps of one of the tiers, the oldest paper first."""
    names = {file.parent.name for tier in tiers for file in (ROOT / "experiments").glob(f"*/{TIERS[tier]}")}
    return sorted(names, key=lambda name: (name.split("_")[1], name))


@dataclass(frozen=True)
class PaperRuns:
    """A paper's runs: the folders of its page and of its sweeps, the failures, and the minutes."""

    paper: str
    tier: str
    out: Path
    folders: Sequence[str]
    failures: Sequence[str]
    minutes: float


def run(paper: str, tier: str, jobs: int) -> PaperRuns:
    """Runs what is left of the paper's sweeps."""
    home, out = ROOT / "experiments" / paper, RUNS / tier / paper
    folders, trials, failures = list[str](), [], []
    for file in sorted(home.glob(TIERS[tier])):
        sweep = out / file.stem
        command = [*sweep_program(), str(file.relative_to(ROOT)), "--jobs", str(jobs), "--folder", str(sweep)]
        failures += ["its sweep could not be run"] * bool(call([*command, "--retry-failed"]))
        with suppress(SweepError):
            study = read_study(sweep)
            folders += map(str, Path("runs").glob(f"*/{study.user_attrs['id']}"))  # of the program's paper
            trials += [(log_of(sweep, trial.number), trial.user_attrs) for trial in trials_of(study)]
    failed = [(log, about["run_id"]) for log, about in trials if about.get("status") == "failed"]
    failures += [f"run {run_id} failed, see {log}" for log, run_id in failed]
    minutes = sum(about.get("seconds", 0.0) for _, about in trials) / jobs / 60
    return PaperRuns(paper, tier, out, folders, failures, minutes)


def judge(runs: PaperRuns) -> Result:
    """Runs the paper's report, on one core."""
    paper, out, failures = runs.paper, runs.out, [*runs.failures]
    (numbers := out / NUMBERS).unlink(missing_ok=True)
    call([f"experiments.{paper}.report", *runs.folders, "--out", str(out), "--pack"], OMP_NUM_THREADS="1")
    verdicts: Sequence[Verdict] = []
    if numbers.exists():
        _, _, verdicts = from_json(read_json(numbers))
    else:
        failures.append("its report was not written")
    for failure in failures:
        print(f"{paper}: {failure}", file=sys.stderr)
    return Result(paper, runs.tier, out, verdicts, failures, runs.minutes)


def sweep_program() -> list[str]:
    """What runs a sweep: with runs that share their imports, unless there is a GPU, which forks cannot use."""
    if torch.accelerator.is_available():
        return ["trimtab_cli", "sweep"]
    return ["experiments.preload", *(f"--preload={module}" for module in PRELOADED)]


def call(command: Sequence[str], **variables: str) -> int:
    """Runs `python -m` with a module of the repository, its arguments and variables; returns the exit status."""
    print(f"\n$ python -m {' '.join(command)}", flush=True)
    env = {**KEEP_MEMORY, **os.environ, **variables}
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=env, check=False).returncode


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def marks(tier: str) -> tuple[str, str]:
    """The lines of a README between which a tier's results stand."""
    name = "reproduced" if tier == "default" else tier
    return f"<!-- {name} -->", f"<!-- /{name} -->"


def around_marks(readme: Path, tier: str = "default") -> tuple[str, str]:
    """The text of a README before and after a tier's marks, the marks included."""
    begin, end = marks(tier)
    before, mark, rest = readme.read_text(encoding="utf-8").partition(begin)
    _, last, after = rest.partition(end)
    if not (mark and last):
        raise SystemExit(f"{readme}: the lines {begin} and {end} are needed, around the table. Add them.")
    return before + mark, last + after


def between_marks(readme: Path, tier: str = "default") -> str:
    """The text between a tier's marks in a README."""
    before, after = around_marks(readme, tier)
    return readme.read_text(encoding="utf-8")[len(before) : -len(after)].strip()


def write_between_marks(readme: Path, text: str, tier: str = "default") -> None:
    """Replaces the text between a tier's marks in a README."""
    before, after = around_marks(readme, tier)
    readme.write_text(f"{before}\n\n{text}\n\n{after}", encoding="utf-8")


def numbers_of(paper: str, tier: str) -> Path:
    """The file with a paper's committed numbers of a tier."""
    return ROOT / "experiments" / paper / f"{COMMITTED[tier]}{NUMBERS}"


def publish(results: Sequence[Result], jobs: int) -> None:
    """Copies pages, figures and numbers into the papers' folders, and writes the table of all committed numbers."""
    for result in results:
        home, prefix = ROOT / "experiments" / result.paper, COMMITTED[result.tier]
        readme = home / "README.md"
        if result.failures or marks(result.tier)[0] not in readme.read_text(encoding="utf-8"):
            continue  # the committed page stays: a part of the runs would judge other claims
        words = (result.folder / MARKDOWN).read_text(encoding="utf-8").rstrip()
        for file in (*result.folder.glob("*.png"), *result.folder.glob("*.pdf")):
            shutil.copyfile(file, home / f"{prefix}{file.name}")
            words = words.replace(f"]({file.name})", f"]({prefix}{file.name})")
        shutil.copyfile(result.folder / ARCHIVE, home / f"{prefix}{ARCHIVE}")
        numbers = numbers_of(result.paper, result.tier)
        content = {"minutes": round(result.minutes, 1), **read_json(result.folder / NUMBERS)}
        write_numbers(numbers, content)
        took = f"{result.minutes:.1f} minutes of runs, {jobs} at a time. The numbers: [{numbers.name}]({numbers.name})."
        took += f" The runs, for `report.py`: [{prefix}{ARCHIVE}]({prefix}{ARCHIVE})."
        write_between_marks(readme, f"{words}\n\n{took}", result.tier)
    write_between_marks(ROOT / "experiments" / "README.md", f"{committed_table()}\n\n{HOW}")


def judge_again() -> None:
    """Judges the committed claims by the committed numbers, and writes the verdicts into numbers and pages."""
    for paper, tier in product(papers(*COMMITTED), COMMITTED):
        if not (file := numbers_of(paper, tier)).exists():
            continue
        content, readme = read_json(file), file.with_name("README.md")
        claimed, measured, _ = from_json(content)
        verdicts = claims.judge(claimed, measured)
        content |= to_json(measured, verdicts)
        write_numbers(file, content)
        words = between_marks(readme, tier)
        rest = words[words.index(content["about"]) :]  # after the table; the figures stay
        write_between_marks(readme, f"{tables(verdicts)}\n\n{rest}", tier)
    write_between_marks(ROOT / "experiments" / "README.md", f"{committed_table()}\n\n{HOW}")


def committed_table() -> str:
    """The verdicts of all papers as Markdown, counted and listed, from the numbers in their folders.

    Those of a paper's largest committed tier; where a smaller one judged a claim otherwise, the cell says how.
    """
    rows, checks, abouts, counted = [], [], [], list[Verdict]()
    for paper in papers(*COMMITTED):
        name = f"[{paper}]({paper}/README.md)"
        tiers = [tier for tier in COMMITTED if numbers_of(paper, tier).exists()]
        if not tiers:
            rows.append((name, "not judged yet", *[""] * len(HEADINGS)))
            continue
        *smaller, content = [read_json(numbers_of(paper, tier)) for tier in tiers]
        before = {each.claim.text: each.words for other in smaller for each in from_json(other)[2]}
        judged = from_json(content)[2]
        informative = [verdict for verdict in judged if not verdict.claim.trivial]
        counted += informative
        sides = [(name, str(content["minutes"])), *[("", "")] * len(informative)]
        rows += [
            (side, *cells(verdict, before), time) for (side, time), verdict in zip(sides, informative, strict=False)
        ]
        checks += [
            (name, *cells(verdict, before), verdict.claim.trivial) for verdict in judged if verdict.claim.trivial
        ]
        abouts.append(f"- {paper}: {content['about']}")
    parts = [counts(counted), markdown(rows, ["paper", *HEADINGS, "minutes"])]
    if checks:
        parts += [CHECKS, markdown(checks, ["paper", *HEADINGS, WHY])]
    return "\n\n".join([*parts, "\n".join(abouts)])


def cells(verdict: Verdict, before: Mapping[str, str]) -> tuple[str, ...]:
    """The row of a verdict, and in its first cell the outcome in a smaller tier if that was another."""
    first, *others = verdict.cells()
    then = before.get(verdict.claim.text, first)
    return (first if then == first else f"{first} (default tier: {then})", *others)


def counts(verdicts: Sequence[Verdict]) -> str:
    """How many claims have each origin and outcome: a sentence and a table."""
    others = ("no effect that matters", "undecided")
    rows = []
    for origin in ORIGINS:
        outcomes = Counter(verdict.outcome for verdict in verdicts if verdict.claim.origin == origin)
        ends = (AGREES[origin], DISAGREES[origin])
        decided = [f"{outcomes[end]} {end}" if outcomes.total() else "" for end in ends]
        rows.append((ORIGINS[origin], str(outcomes.total()), *decided, *(str(outcomes[end]) for end in others)))
    headings = ("claims", "count", "agree", "disagree", *others)
    return f"Claims that are counted: {len(verdicts)}.\n\n{markdown(rows, headings)}"


def main() -> int:
    """Returns 0 if every paper ran and was judged, whatever the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("papers", nargs="*", help="folders of experiments (default: all that the tier has)")
    parser.add_argument("--tier", choices=TIERS, default="default", help="the size of the runs (default: default)")
    parser.add_argument("--judge-again", action="store_true", help="run nothing; judge the committed numbers")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default 2)")
    arguments = parser.parse_args()
    known = papers(arguments.tier)
    if unknown := set(arguments.papers) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}. The tier {arguments.tier} has {', '.join(known)}.")
    if arguments.judge_again:
        judge_again()
        return 0
    os.chdir(ROOT)  # sweeps name their programs from here
    chosen = arguments.papers or known
    is_published = arguments.tier in COMMITTED
    for folder in ("", *chosen) if arguments.tier == "default" else ():  # before the hours of work, not after them
        around_marks(ROOT / "experiments" / folder / "README.md")
    began = time.monotonic()
    with ThreadPoolExecutor(1) as reports:  # which need one core, and the next paper's first runs the others
        pending = [reports.submit(judge, run(paper, arguments.tier, arguments.jobs)) for paper in chosen]
    results = [report.result() for report in pending]
    if is_published:
        publish(results, arguments.jobs)
    for result in results:
        print(f"\n{result.paper}: {result.minutes:.1f} minutes, {result.folder / 'report.html'}")
        print(*result.verdicts, *(f"failed        {failure}" for failure in result.failures), sep="\n")
    print(f"{(time.monotonic() - began) / 60:.0f} minutes in all")
    return 1 if any(result.failures for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
