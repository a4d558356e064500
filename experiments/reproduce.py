"""Runs every paper's experiment at its default size, and writes the table of claims: `make reproduce`.

For each paper it runs the sweeps experiments/<paper>/reproduce*.yaml, and then report.py over their runs. It does not
repeat the runs in runs/reproduce that have finished; remove that folder to start over. It writes the table and the
figures between the marks of experiments/README.md and of each paper's README.md.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNS = Path("runs", "reproduce")
BEGIN, END = "<!-- reproduced -->", "<!-- /reproduced -->"
HEADINGS = ("paper", "claim", "expected", "obtained", "", "minutes")
FAILED = "failed"  # what `trimtab sweep` calls a trial whose program failed


@dataclass(frozen=True)
class Result:
    """The result of a paper: rows of claim, expected, obtained and outcome; its figure; the minutes that it took."""

    paper: str
    rows: Sequence[tuple[str, str, str, str]]
    figure: Path | None
    minutes: float
    is_complete: bool  # every run ended well, and the report was written

    def table(self) -> list[tuple[str, ...]]:
        """Rows under HEADINGS; only the first has the paper and its minutes."""
        link = f"[{self.paper}]({self.paper}/README.md)"
        sides = [(link, f"{self.minutes:.1f}"), *[("", "")] * len(self.rows)]
        return [(name, *row, minutes) for (name, minutes), row in zip(sides, self.rows, strict=False)]


def papers() -> list[str]:
    """The folders that have a reproduce*.yaml, the oldest paper first."""
    names = {file.parent.name for file in (ROOT / "experiments").glob("*/reproduce*.yaml")}
    return sorted(names, key=lambda name: (name.split("_")[1], name))


def reproduce(paper: str, jobs: int) -> Result:
    """Runs what is left of the paper's sweeps, and its report."""
    home, out = ROOT / "experiments" / paper, RUNS / paper
    folders, trials, failures = [], [], []
    for file in sorted(home.glob("reproduce*.yaml")):
        sweep = out / file.stem
        command = ["trimtab_cli", "sweep", str(file.relative_to(ROOT)), "--jobs", str(jobs), "--folder", str(sweep)]
        command.append("--retry-failed")
        failures += ["its sweep could not be run"] * bool(call(command))
        if (about := sweep / "sweep.json").exists():
            folders.append(str(Path("runs", paper, json.loads(about.read_text(encoding="utf-8"))["id"])))
        trials += read_lines(sweep / "trials.jsonl")
    failures += [f"run {trial['run_id']} failed, see {trial['log']}" for trial in trials if trial["status"] == FAILED]
    (verdicts := out / "verdicts.json").unlink(missing_ok=True)
    call([f"experiments.{paper}.report", *folders, "--out", str(out)])
    judged: dict[str, Any] = {"figures": [], "verdicts": []}
    if verdicts.exists():
        judged = json.loads(verdicts.read_text(encoding="utf-8"))
    else:
        failures.append("its report was not written")
    for failure in failures:
        print(f"{paper}: {failure}", file=sys.stderr)
    rows = [(v["claim"], v["expected"], v["obtained"], "pass" if v["passed"] else "FAIL") for v in judged["verdicts"]]
    rows += [("it runs", "no failure", f"{len(failures)} failed", "FAIL")] * bool(failures)
    return Result(
        paper,
        rows,
        out / f"{judged['figures'][0]}.png" if judged["figures"] else None,
        sum(trial["seconds"] or 0 for trial in trials) / jobs / 60,
        not failures,
    )


def call(command: Sequence[str]) -> int:
    """Runs `python -m` with a module of the repository and its arguments; returns the exit status."""
    print(f"\n$ python -m {' '.join(command)}", flush=True)
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False).returncode


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines; empty if there is no file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def markdown(rows: Sequence[Sequence[str]], headings: Sequence[str] = HEADINGS) -> str:
    """Formats a table as Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def provenance(jobs: int) -> str:
    """The commit, the day, the machine and the versions, in words."""
    git = ["git", "-C", str(ROOT)]
    commit, changed = (
        subprocess.run([*git, *words], capture_output=True, text=True, check=False).stdout.strip()
        for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    )
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "diffusers"))
    return (
        f"Commit {commit or 'unknown'}{' with changes' if changed else ''}, {datetime.now(UTC):%Y-%m-%d}, "
        f"{len(os.sched_getaffinity(0))} {platform.machine()} cores, {jobs} runs side by side, Python "
        f"{platform.python_version()}, {libraries}. Numbers are medians over the seeds, with their range. Minutes are "
        "those of the runs, divided by how many ran side by side."
    )


def around_marks(readme: Path) -> tuple[str, str]:
    """The text of a README before and after its marks, the marks included."""
    before, mark, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (mark and end):
        raise SystemExit(f"{readme}: the lines {BEGIN} and {END} are needed, around the table. Add them.")
    return before + mark, end + after


def write_between_marks(readme: Path, text: str) -> None:
    """Replaces the text between the marks of a README."""
    before, after = around_marks(readme)
    readme.write_text(f"{before}\n\n{text}\n\n{after}", encoding="utf-8")


def publish(results: Sequence[Result], about: str, *, is_all: bool) -> None:
    """Copies figures and tables into the papers' folders; with `is_all`, writes the table of all papers too."""
    home = ROOT / "experiments"
    parts = [markdown([row for result in results for row in result.table()]), about]
    for result in results:
        picture = ""
        if result.figure:
            shutil.copyfile(ROOT / result.figure, home / result.paper / "figure.png")
            picture = f"\n\n![{result.paper}](figure.png)"
            parts.append(f"### {result.paper}\n\n![{result.paper}]({result.paper}/figure.png)")
        table = markdown(result.rows, HEADINGS[1:-1])
        whole = f"{table}\n\n{about} Here: {result.minutes:.1f} minutes.{picture}"
        write_between_marks(home / result.paper / "README.md", whole)
    if is_all:
        write_between_marks(home / "README.md", "\n\n".join(parts))


def main() -> int:
    """Returns 0 if every paper ran and was judged, whatever the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("papers", nargs="*", help=f"which of {', '.join(papers())} (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default 2)")
    arguments = parser.parse_args()
    if unknown := set(arguments.papers) - set(papers()):
        parser.error(f"unknown: {', '.join(sorted(unknown))}. Choose from {', '.join(papers())}.")
    os.chdir(ROOT)  # sweeps name their programs from here
    chosen = arguments.papers or papers()
    for folder in ("", *chosen):  # before the hour of work, not after it
        around_marks(ROOT / "experiments" / folder / "README.md")
    began, about = time.monotonic(), provenance(arguments.jobs)
    results = [reproduce(paper, arguments.jobs) for paper in chosen]
    publish(results, about, is_all=not arguments.papers)
    print(f"\n{markdown([row for result in results for row in result.table()])}\n\n{about}")
    print(f"{(time.monotonic() - began) / 60:.0f} minutes in all")
    return 0 if all(result.is_complete for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
