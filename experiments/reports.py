"""What every report.py shares: it reads finished runs, judges the paper's claims, and writes a page about them.

A report writes into its folder: report.html, which needs no other file; report.md, the same for a README; numbers.json,
from which the verdicts can be computed again; and each figure as PNG and PDF.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from matplotlib.figure import Figure

from experiments.claims import AGREES, HEADINGS, Claim, Numbers, Verdict, judge, rounded, to_json, write_numbers
from experiments.figures import write_page
from experiments.provenance import in_words
from experiments.run_folders import ARCHIVE, Run, finished_run, finished_runs, pack, unpacked

NUMBERS, MARKDOWN = "numbers.json", "report.md"
HOW = (
    "A verdict is about the mean effect over seeds, and over prompts where each prompt has a number; else it holds for "
    "the prompts that were used. Runs with one seed, and answers to one prompt, are compared in pairs. Interval and "
    "p-value are those of an analysis of variance with random seeds and prompts. p is corrected by Holm's rule for all "
    "claims of the page, the checks included; every verdict but undecided needs 0.05 at most. No effect that matters, "
    "and claims of little effect, are tests of equivalence with an interval of 90%. Seeds that agree are those whose "
    "own effect is on the side of the mean: above or below, or, in a test of equivalence, within or beyond the margin. "
    "The last column is the chance that this test, after the correction, finds the smallest effect that matters at the "
    "observed noise. Below 50% an undecided claim says nothing."
)
ONE_RUN = "one run, which has no verdict: eight and more seeds are judged in experiments/README.md"
WHY = "why it is a check"
CHECKS = "Checks, which are not counted: the last column says why."
UNJUDGED = (
    "Nothing is judged: these runs lack quantities that the paper's claims compare, such as a control or other seeds."
)


@dataclass(frozen=True)
class Report:
    """What a paper's report reads from runs.

    Attributes:
        measured: The quantities that the claims compare, by name: seed -> a number, or one for each prompt.
        claims: The claims of the paper. Those whose quantities the runs do not have are left out.
        figures: Figures by file name; the first is the paper's.
        captions: For each figure, what it shows, with the number of seeds and the meaning of its bands.
        samples: A table, from heading to cells [N], such as prompt, before and after.
        outcome: What a single run reached, a line each; such a run has no verdicts. Empty: the claims' effects.
    """

    measured: Mapping[str, Numbers]
    claims: Sequence[Claim]
    figures: Mapping[str, Figure]
    captions: Mapping[str, str]
    samples: Mapping[str, Sequence[object]] = field(default_factory=dict)
    outcome: Sequence[str] = ()


def write_report(folder: Path, title: str, claim: str, report: Report, runs: Sequence[Run]) -> Sequence[Verdict]:
    """Judges, writes report.html, report.md, numbers.json and the figures, and returns the verdicts."""
    measured = rounded(report.measured)
    verdicts = judge(report.claims, measured)
    single = outcome_of(report, verdicts)
    ordered = sorted(verdicts, key=lambda verdict: bool(verdict.claim.trivial))
    rows = [] if single else [verdict.cells() for verdict in ordered]
    columns = {heading: [row[i] for row in rows] for i, heading in enumerate(HEADINGS)} if rows else {}
    about, config = in_words([start for run in runs for start in run.starts]), settings(runs)
    texts = [claim, *(single or [HOW if rows else UNJUDGED]), about]
    write_page(folder, title, texts, columns, report.figures, report.captions, report.samples, config)
    parts = [*(single or [tables(verdicts)]), about]
    for name in report.figures:
        image = f"![{title}: {name.replace('_', ' ')}]({name}.png)"
        parts.append(f"{image}\n\n*{report.captions[name]}* ([PDF]({name}.pdf))")
    if report.samples:
        cells = zip(*report.samples.values(), strict=True)
        parts += ["**Samples**", markdown([[str(cell) for cell in row] for row in cells], list(report.samples))]
    (folder / MARKDOWN).write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    content = {"about": about, "settings": config, **to_json(measured, verdicts)}
    write_numbers(folder / NUMBERS, content)
    return verdicts


def outcome_of(report: Report, verdicts: Sequence[Verdict]) -> list[str]:
    """What one run reached, in lines; none if there are verdicts on several seeds, or nothing was measured."""
    if not verdicts or max(verdict.seeds for verdict in verdicts) > 1:
        return []
    return [*(report.outcome or [f"{verdict.claim.text}: {verdict.obtained}" for verdict in verdicts]), ONE_RUN]


def tables(verdicts: Sequence[Verdict]) -> str:
    """The verdicts as Markdown, and the checks in a table of their own, each with the reason why it is trivial."""
    rows = [verdict.cells() for verdict in verdicts if not verdict.claim.trivial]
    parts = [markdown(rows, HEADINGS)] if rows else []
    if checks := [(*verdict.cells(), verdict.claim.trivial) for verdict in verdicts if verdict.claim.trivial]:
        parts += [CHECKS, markdown(checks, (*HEADINGS, WHY))]
    return "\n\n".join(parts) if verdicts else UNJUDGED


def markdown(rows: Sequence[Sequence[str]], headings: Sequence[str]) -> str:
    """Formats a table as Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(
        "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def settings(runs: Sequence[Run]) -> dict[str, Any]:
    """Each setting with its value, or with its sorted values if runs differ."""
    shown: dict[str, Any] = {}
    for name in dict.fromkeys(name for run in runs for name in run.config):
        values = sorted({str(run.config[name]) for run in runs if name in run.config})
        shown[name] = ", ".join(values) if len(values) <= 12 else f"{len(values)} values"
    return shown


def check_measured_alike(runs: Sequence[Run]) -> None:
    """Raises an error if runs were measured on other prompts, with other lengths, or began with other models."""
    for name in ("model", "eval_split", "eval_prompts", "eval_pictures", "max_new_tokens"):
        firsts = {str(run.config[name]): run.folder for run in runs if name in run.config}
        if len(firsts) > 1:
            found = ", ".join(f"{value} ({folder})" for value, folder in firsts.items())
            raise ValueError(
                f"the runs have several values of {name}: {found}; runs that are measured alike are needed. Give the "
                "folders of one tier."
            )


def report_on(
    title: str,
    claim: str,
    read: Callable[[Sequence[Run]], Report],
    runs: Sequence[Run],
    folder: Path,
    *,
    packs: bool = False,
) -> Sequence[Verdict]:
    """Judges finished runs, writes the report into `folder`, and prints it.

    With `packs` it also writes the archive of the runs there.
    """
    check_measured_alike(runs)
    report = read(runs)
    verdicts = write_report(folder, title, claim, report, runs)
    if packs:
        pack(runs, folder / ARCHIVE)
    print(*(outcome_of(report, verdicts) or verdicts), f"page: {folder / 'report.html'}", sep="\n")
    return verdicts


def report_on_run(
    title: str, claim: str, read: Callable[[Sequence[Run]], Report], folders: Sequence[Path], out: Path | None = None
) -> None:
    """`report_on` for the runs in `folders`, at their end, in `out` (default: the first folder).

    The runs of a sweep are judged together, by its own report. They may be in folders below that of another run.
    """
    if not os.environ.get("WANDB_SWEEP_ID"):
        report_on(title, claim, read, [finished_run(folder) for folder in folders], out or folders[0])


def main(title: str, claim: str, read: Callable[[Sequence[Run]], Report]) -> None:
    """Runs report.py FOLDER ... [--out FOLDER] [--pack]. Exits with 0 if the runs agree with every claim, else 1."""
    parser = argparse.ArgumentParser(description=f"{title}. Reads finished runs, and judges: {claim}")
    parser.add_argument("folders", nargs="+", type=Path, help=f"folders of runs or of a sweep's runs, or {ARCHIVE}")
    parser.add_argument("--out", type=Path, help="where the page and the figures go (default: the first folder)")
    parser.add_argument("--pack", action="store_true", help=f"also write {ARCHIVE}, to report on again")
    arguments = parser.parse_args()
    out = arguments.out or arguments.folders[0]
    if out.suffix == ".zip":
        parser.error(f"{out} is an archive: say with --out in which folder the page is to be.")
    with TemporaryDirectory() as place:
        folders = [unpacked(folder, Path(place)) for folder in arguments.folders]
        verdicts = report_on(title, claim, read, finished_runs(*folders), out, packs=arguments.pack)
    agree = [verdict.outcome == AGREES[verdict.claim.origin] for verdict in verdicts]
    sys.exit(0 if agree and all(agree) else 1)


def seeds_in_words(count: int) -> str:
    """One seed, 8 seeds."""
    return "one seed" if count == 1 else f"{count} seeds"


def medians_in_words(seeds: int) -> str:
    """What curves and their bands show: of one seed, the curves alone."""
    words = f"medians of {seeds} seeds, bands from the lower to the upper quartile"
    return "one seed" if seeds == 1 else words


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """The median and the range of the seeds: 0.812 (0.790 to 0.820)."""
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"
