"""What every report.py does alike: read finished runs, judge the claim, write the page, and exit by the verdicts."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from experiments.figures import Verdict, exit_code, write_page
from experiments.runs import Run, finished_runs

VERDICTS = "verdicts.json"


@dataclass(frozen=True)
class Report:
    """What a paper's report finds in runs: verdicts, figures by file name (the first is the paper's), and samples.

    samples: heading -> cells [N], such as prompt, before and after.
    """

    verdicts: Sequence[Verdict]
    figures: Mapping[str, Figure]
    samples: Mapping[str, Sequence[object]] = field(default_factory=dict)


def write_report(folder: Path, title: str, claim: str, report: Report, runs: Sequence[Run]) -> Path:
    """Write report.html with its figures as PNG beside it, and verdicts.json; returns the page."""
    path = write_page(folder, title, claim, report.verdicts, report.figures, report.samples, settings(runs))
    found = {"figures": list(report.figures), "verdicts": [asdict(verdict) for verdict in report.verdicts]}
    (folder / VERDICTS).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return path


def settings(runs: Sequence[Run]) -> dict[str, Any]:
    """Each setting with its value; where runs differ, with all of its values."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for run in runs for name in run.config):
        values = list(dict.fromkeys(str(run.config.get(name)) for run in runs))
        found[name] = ", ".join(values) if len(values) <= 12 else f"{len(values)} values"
    return found


def report_on(
    title: str, claim: str, judge: Callable[[Sequence[Run]], Report], folders: Sequence[Path], out: Path | None = None
) -> Sequence[Verdict]:
    """Judge the finished runs below `folders`, write the report into `out` (or the first of them), and print it."""
    runs = finished_runs(*folders)
    report = judge(runs)
    page = write_report(out or folders[0], title, claim, report, runs)
    print(*report.verdicts, f"page: {page}", sep="\n")
    return report.verdicts


def main(title: str, claim: str, judge: Callable[[Sequence[Run]], Report]) -> None:
    """The program: report.py FOLDER [FOLDER ...] [--out FOLDER]. Exits with 0 if every verdict is a pass, else 1."""
    parser = argparse.ArgumentParser(description=f"{title}. Reads finished runs, and judges: {claim}")
    parser.add_argument("folders", nargs="+", type=Path, help="folders of runs, or of a sweep's runs")
    parser.add_argument("--out", type=Path, help="where report.html and the figures go (default: the first folder)")
    given = parser.parse_args()
    sys.exit(exit_code(report_on(title, claim, judge, given.folders, given.out)))


def spread(values: Iterable[float], form: str = ".3f") -> str:
    """Median and range of the seeds, as a table shows them: 0.812 (0.790 to 0.820)."""
    known = list(values)
    if len(known) == 1:
        return f"{known[0]:{form}}"
    return f"{median(known):{form}} ({min(known):{form}} to {max(known):{form}})"
