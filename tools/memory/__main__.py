"""Measures the peak device bytes of an optimizer step of trimtab and of TRL, and writes docs/memory-table.md.

    python -m tools.memory                                               every cell that peaks.json lacks
    python -m tools.memory --again --only dpo grpo                       these trainers anew
    python -m tools.memory --page                                        the page alone, from peaks.json

Each cell is a process in a side's environment of tools/bench, on the pretend accelerator of tests/pretend.
"""

import json
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from tools.bench.__main__ import BenchError, started
from tools.bench.environments import FOLDER, ROOT, python_of
from tools.bench.table import markdown
from tools.bench.works import OURS, TRL, TRL_DDPO, TRL_PPO

PEAKS = ROOT / "tools" / "memory" / "peaks.json"
PAGE = ROOT / "docs" / "memory-table.md"
MODELS = FOLDER / "models" / "smoke-cpu"
BEGIN, END = "<!-- what follows is written by python -m tools.memory -->", "<!-- end of what it writes -->"
MEMORY = 8 * 2**30
TASKS = {"sft": TRL, "dpo": TRL, "reward": TRL, "grpo": TRL, "ppo": TRL_PPO, "ddpo": TRL_DDPO}
HAS_KERNELS = ("sft", "dpo", "grpo")
SIDES = {"ours": "trimtab, MiB", "peer": "TRL, MiB", "kernels": "TRL as with its kernels, MiB"}
LENGTHS, VOCABULARIES = (512, 2048, 8192), (32_000, 128_000)


class Cell(NamedTuple):
    """One figure of the table; `side` is ours, peer, or kernels: the peer as its Triton kernels would run."""

    task: str
    vocabulary: int
    tokens: int
    side: str

    @property
    def key(self) -> str:
        return f"{self.task} {self.vocabulary} {self.tokens} {self.side}"


def rows() -> Iterator[tuple[str, int, int]]:
    """The trainer, vocabulary and tokens of each row. DDPO has neither vocabulary nor tokens."""
    for tokens, vocabulary, task in product(LENGTHS, VOCABULARIES, TASKS):
        if task != "ddpo":
            yield task, vocabulary, tokens
    yield "ddpo", 0, 0


def measured(cell: Cell) -> int | str:
    """The peak of a cell in bytes, or why there is none."""
    environment = OURS if cell.side == "ours" else TASKS[cell.task]
    order = {
        "task": cell.task,
        "package": "trimtab_lm" if cell.side == "ours" else "trl",
        "vocabulary": cell.vocabulary or 1000,
        "tokens": cell.tokens or 48,
        "memory": MEMORY,
        "triton": cell.side == "kernels",
        "pipeline": str(MODELS),
    }
    program = (
        f"import runpy, sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests/pretend')!r}]; "
        f"sys.argv[1:] = [{json.dumps(order)!r}]; runpy.run_module('tools.memory.process', run_name='__main__')"
    )
    result: int | str = json.loads(started([python_of(environment), "-c", program], environment).splitlines()[-1])
    return result


def page(text: str, peaks: dict[str, int | str]) -> str:
    """The page's text with its table made of the peaks."""
    table = [["trainer", "peer", "vocabulary", "tokens", *SIDES.values(), "TRL / trimtab, and with its kernels"]]
    for task, vocabulary, tokens in sorted(rows(), key=lambda row: list(TASKS).index(row[0])):
        figures: list[Any] = [peaks.get(Cell(task, vocabulary, tokens, side).key) for side in SIDES]
        if not any(figures):
            continue
        shown = [_mib(figure) for figure in figures]
        if task not in HAS_KERNELS:
            shown[2] = "has none"
        ratios = [f"{figure / figures[0]:.1f}" if isinstance(figure, int) else "-" for figure in figures[1:]]
        sizes = [f"{number:,}" if number else "" for number in (vocabulary, tokens)]
        table.append([task, TASKS[task].replace("trl-", "TRL "), *sizes, *shown, ", ".join(ratios)])
    before, _, rest = text.partition(BEGIN)
    return before + "\n\n".join([BEGIN, markdown(table), END]) + rest.partition(END)[2]


def _mib(peak: int | str | None) -> str:
    if peak is None:
        return "not measured"
    return f"{peak / 2**20:,.0f}" if isinstance(peak, int) else f"more than {MEMORY // 2**20:,}"


def main(arguments: list[str]) -> int:
    """Measures the cells that are asked for; returns the exit status."""
    parser = ArgumentParser(prog="tools.memory", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--again", action="store_true", help="measure what peaks.json has too")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    peaks: dict[str, int | str] = json.loads(PEAKS.read_text()) if PEAKS.exists() else {}
    subprocess.run([sys.executable, "tests/pretend/build.py"], cwd=ROOT, check=True)
    if "ddpo" in options.only and not options.page:  # the peer's transformers cannot write what both can read
        started([sys.executable, "-m", "tools.bench.models", MODELS.name, str(MODELS)], OURS)
    failed = False
    for row in rows():
        for side in ("ours", "peer", *(["kernels"] if row[0] in HAS_KERNELS else [])):
            cell = Cell(*row, side)
            if options.page or cell.task not in options.only or (cell.key in peaks and not options.again):
                continue
            try:
                peaks[cell.key] = measured(cell)
                print(cell.key, peaks[cell.key], flush=True)
            except BenchError as error:
                failed = True
                print(f"{cell.key}: {error}", file=sys.stderr, flush=True)
            PEAKS.write_text(json.dumps(peaks, indent=1) + "\n")
    PAGE.write_text(page(PAGE.read_text(), peaks))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
