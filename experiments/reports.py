"""What every report.py shares: it reads finished runs, judges the claim, writes a page, and exits by the verdicts."""

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
    """What a paper's report concludes from runs.

    Attributes:
        verdicts: The judged claims.
        figures: Figures by file name; the first is the paper's.
        samples: A table, from heading to cells [N], such as prompt, before and after.
    """

    verdicts: Sequence[Verdict]
    figures: Mapping[str, Figure]
    samples: Mapping[str, Sequence[object]] = field(default_factory=dict)


def write_report(folder: Path, title: str, claim: str, report: Report, runs: Sequence[Run]) -> Path:
    """Writes report.html, its figures as PNG files and verdicts.json; returns the path of the page."""
    path = write_page(folder, title, claim, report.verdicts, report.figures, report.samples, settings(runs))
    content = {"figures": list(report.figures), "verdicts": [asdict(verdict) for verdict in report.verdicts]}
    (folder / VERDICTS).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def settings(runs: Sequence[Run]) -> dict[str, Any]:
    """Each setting with its value, or with all of its values where the runs differ."""
    shown: dict[str, Any] = {}
    for name in dict.fromkeys(name for run in runs for name in run.config):
        values = list(dict.fromkeys(str(run.config.get(name)) for run in runs))
        shown[name] = ", ".join(values) if len(values) <= 12 else f"{len(values)} values"
    return shown


def report_on(
    title: str, claim: str, judge: Callable[[Sequence[Run]], Report], folders: Sequence[Path], out: Path | None = None
) -> Sequence[Verdict]:
    """Judges the finished runs below `folders`, writes the report into `out` (default: the first), and prints it."""
    runs = finished_runs(*folders)
    report = judge(runs)
    page = write_report(out or folders[0], title, claim, report, runs)
    print(*report.verdicts, f"page: {page}", sep="\n")
    return report.verdicts


def main(title: str, claim: str, judge: Callable[[Sequence[Run]], Report]) -> None:
    """Runs report.py FOLDER [FOLDER ...] [--out FOLDER]. Exits with 0 if every verdict is a pass, else with 1."""
    parser = argparse.ArgumentParser(description=f"{title}. Reads finished runs, and judges: {claim}")
    parser.add_argument("folders", nargs="+", type=Path, help="folders of runs, or of a sweep's runs")
    parser.add_argument("--out", type=Path, help="where report.html and the figures go (default: the first folder)")
    arguments = parser.parse_args()
    sys.exit(exit_code(report_on(title, claim, judge, arguments.folders, arguments.out)))


def spread(values: Iterable[float], form: str = ".3f") -> str:
    """The median and the range of the seeds, as a table shows them: 0.812 (0.790 to 0.820)."""
    known = list(values)
    if len(known) == 1:
        return f"{known[0]:{form}}"
    return f"{median(known):{form}} ({min(known):{form}} to {max(known):{form}})"
