"""Writes the README's tables from results.json."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tools.bench.works import ABLATIONS, FAIR, WORKS, Work

BEGIN, END = "<!-- what follows is written by make bench -->", "<!-- end of what make bench writes -->"
BUSY = 1.5
"""Load average above which other programs ran; a measurement alone has 1."""

Report = Mapping[str, Any]
"""The report that a process of tools.bench.process printed."""

Result = Mapping[str, Any]
"""A line of results.json: `work`, `device`, `day`, `machine`, `commit`, and `pairs` of reports (`ours`, `other`).

A pair also has the machine's `load` average before it. Some lines have a `profile`: time shares of a trimtab step."""

Results = Sequence[Result]

Figure = Callable[[Report], float]

SIDES = ("other", "ours")
HEADER = [
    "work",
    "settings",
    "seconds a step",
    "ratio (range)",
    "peak MiB",
    "ratio (range)",
    "per second",
    "% of matmul rate",
    "read",
]


def step_seconds(report: Report) -> float:
    """Returns the mean seconds of a step; the steps have different rows."""
    return statistics.mean(report["seconds"])


def memory(report: Report) -> float:
    """Returns the peak memory in MiB."""
    return report["memory"] / 2**20


def rate(report: Report) -> float:
    """Returns tokens or images per second."""
    return report["units"] / sum(report["seconds"])


def flops_rate(report: Report) -> float:
    """Returns model FLOPs per second."""
    return report["flops"] / sum(report["seconds"])


def read(report: Report) -> float:
    """Returns what the models read per step: positions, padding included, or the U-Net's rows per image."""
    facts = report["facts"]
    return facts["rows to sample"] + facts["rows to train"] if "rows to train" in facts else facts["positions"]


def row(work: Work, result: Result) -> list[str]:
    """Returns a work's cells: for each figure, the medians of the other side / of ours."""
    pairs = processor_time(result["pairs"]) if is_disturbed(result) else result["pairs"]

    matmul = max(pair[side]["matmul"] for pair in pairs for side in SIDES)

    def both(figure: Figure, form: str) -> str:
        medians = [statistics.median(figure(pair[side]) for pair in pairs) for side in SIDES]
        return " / ".join(format(median, ".0f" if median >= 100 else form) for median in medians)

    def ratio(figure: Figure) -> str:
        ratios = sorted(figure(pair["other"]) / figure(pair["ours"]) for pair in pairs)
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}" if len(ratios) > 1 else "one pair"
        return f"**{statistics.median(ratios):.2f}** ({spread})"

    return [
        work.name + ("*" if is_disturbed(result) else ""),
        f"{work.text(work.other)} / {work.text(work.ours)}",
        both(step_seconds, ".3g"),
        ratio(step_seconds),
        both(memory, ".0f"),
        ratio(memory),
        f"{both(rate, '.3g')} {pairs[0]['ours']['unit']}",
        both(lambda report: 100 * flops_rate(report) / matmul, ".0f"),
        both(read, ".0f"),
    ]


def is_disturbed(result: Result) -> bool:
    """Whether other programs used the processor during the measurement."""
    return result["device"] == "cpu" and any(pair["load"] > BUSY for pair in result["pairs"])


def processor_time(pairs: Sequence[Mapping[str, Any]]) -> list[dict[str, Report]]:
    """Returns the pairs with processor seconds in place of wall-clock seconds."""
    return [{side: {**pair[side], "seconds": pair[side]["processor_seconds"]} for side in SIDES} for pair in pairs]


def table(works: list[Work], results: Results) -> str:
    """Returns a Markdown table with a row for each work that has a result."""
    by_name = {result["work"]: result for result in results}
    return markdown([HEADER, *(row(work, by_name[work.name]) for work in works if work.name in by_name)])


def headline(results: Results) -> list[str]:
    """Returns a sentence with the ratios of seconds in the rows of `FAIR` that have been measured, if there are any.

    On a GPU the peer chooses positions as on a GPU without being told.
    """
    by_name, parts = {result["work"]: result for result in results}, []
    for title, rows in FAIR.items():
        names = rows if results[0]["device"] == "cpu" else [name.removesuffix("-positions") for name in rows]
        ratios = sorted(median_ratio(by_name[name]) for name in names if name in by_name)
        if ratios:
            shown = f"{ratios[0]:.1f}" if len(ratios) == 1 else f"{ratios[0]:.1f} to {ratios[-1]:.1f}"
            parts.append(f"{title} **{shown}** ({', '.join(f'`{name}`' for name in names if name in by_name)})")
    text = (
        "The peer's time over ours, where the peer computes what it would compute on a GPU and samples in batches as "
        f"large as ours: {', '.join(parts)}."
    )
    return [text] if parts else []


def median_ratio(result: Result) -> float:
    """Returns the other side's seconds over ours, the median of the pairs."""
    pairs = processor_time(result["pairs"]) if is_disturbed(result) else result["pairs"]
    return statistics.median(step_seconds(pair["other"]) / step_seconds(pair["ours"]) for pair in pairs)


def profiles(results: Results) -> str:
    """Returns a Markdown table of the profiles, in percent."""
    header = ["work", *results[0]["profile"]]
    rows = [[one["work"], *(f"{share:.0%}" for share in one["profile"].values())] for one in results]
    return markdown([header, *rows])


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table; the first row is its header."""
    header, *others = rows
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *others])


def versions(results: Results) -> str:
    """Returns a line of package versions for each environment."""
    by_name, lines = {work.name: work for work in [*WORKS, *ABLATIONS]}, {}
    for result in results:
        work = by_name[result["work"]]
        for side, report in zip((work.other, work.ours), map(result["pairs"][0].get, SIDES), strict=True):
            packages = (f"{name} {version}" for name, version in report["versions"].items() if version)
            lines[side.environment] = f"- {side.environment}: {', '.join(packages)}"
    return "\n".join(lines.values())


def section(device: str, results: Results) -> str:
    """Returns everything that was measured on a device, in Markdown."""
    machines, days = (sorted({result[name] for result in results}) for name in ("machine", "day"))
    period = " to ".join(dict.fromkeys((days[0], days[-1])))
    parts = [
        f"## {', '.join(machines)}",
        f"`--device {device}`, measured {period}. Each cell is the peer's number / ours; results.json has each row's "
        "commit and its processes.",
        *headline(results),
        table(WORKS, results),
    ]
    if any(map(is_disturbed, results)):
        parts.append(
            f"\\* Other programs were running: the machine's load average was above {BUSY}. These rows give the "
            "processor time of the measured process, which still shared caches and memory with them."
        )
    if {work.name for work in ABLATIONS} & {result["work"] for result in results}:
        parts += ["### What each shortcut saves: without it / with it", table(ABLATIONS, results)]
    if profiled := [result for result in results if "profile" in result]:
        parts += ["### Where the time of a trimtab step goes", profiles(profiled)]
    return "\n\n".join([*parts, "### Versions", versions(results)])


def page(text: str, results: Results) -> str:
    """Returns the README's text with newly written tables."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    devices = dict.fromkeys(result["device"] for result in results)
    sections = [section(device, [one for one in results if one["device"] == device]) for device in devices]
    return before + "\n\n".join([BEGIN, *sections, END]) + after
