"""Kills each trainer's processes again and again until the run ends, and compares it with an undisturbed run.

    make chaos                                  all seven trainers, one and two processes, more than 100 kills
    make chaos ARGS="--only ppo sft --kills 30"
    python -m tools.chaos --short               a few kills of two trainers in under a minute; CI runs this

A seed fixes the order of the kills and their random times; the machine decides which part of a step they hit.
"""

import json
import os
import platform
import shutil
import sys
import tempfile
import time
import warnings
from argparse import ArgumentParser, Namespace
from collections import Counter
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from random import Random

import torch
from tools.chaos.comparing import difference
from tools.chaos.processes import ENDS, KINDS, Group
from tools.chaos.works import WORKS

TRAINERS = tuple(name for name in WORKS if not name.endswith("_step"))
RECORD = Path(__file__).with_name("record.json")
PATIENCE = 120.0
"""Seconds after which a process counts as hung."""


@dataclass
class Row:
    """The results of one trainer's runs.

    Attributes:
        kills: number of kills by kind.
        starts: number of times that the processes were started.
        ended: number of processes that the launcher ended, because they outlived one that failed.
        runs: number of finished runs, all of which were compared.
        difference: first difference from the undisturbed run; empty if all runs equal it.
    """

    trainer: str
    processes: int
    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    starts: int = 0
    ended: int = 0
    runs: int = 0
    difference: str = ""
    seconds: float = 0.0


def main(arguments: list[str]) -> int:
    """Runs what the arguments ask for; returns 1 if a run differs."""
    options = parsed(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    folder = Path(options.folder or tempfile.mkdtemp())  # the first forked process would remove a TemporaryDirectory
    for size, kills in ((1, options.kills), (2, options.pair_kills)):
        for trainer in options.only if kills else ():
            rows.append(row := punished(trainer, folder, size, options.tracker, kills=kills, seed=options.seed))
            print(table([row]).splitlines()[-1], flush=True)
    if not options.folder and not any(row.difference for row in rows):
        shutil.rmtree(folder)
    total = sum(sum(row.kills.values()) for row in rows)
    print(f"\n{table(rows)}\n\n{total} kills, {sum(row.runs for row in rows)} runs, {' '.join(machine())}")
    if options.record:
        record = {
            "seed": options.seed,
            "tracker": options.tracker,
            "machine": machine(),
            "rows": [asdict(row) for row in rows],
        }
        options.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(any(row.difference for row in rows))


def parsed(arguments: list[str]) -> Namespace:
    """Returns the parsed options."""
    parser = ArgumentParser(prog="python -m tools.chaos", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", nargs="+", choices=list(WORKS), default=list(TRAINERS), help="these trainers")
    parser.add_argument("--kills", type=int, default=12, help="kills per trainer in one process")
    parser.add_argument("--pair-kills", type=int, default=4, help="kills per trainer in two processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tracker", choices=("tensorboard", "wandb"), default="tensorboard", help="wandb: offline")
    parser.add_argument("--folder", help="keep the runs in this folder")
    parser.add_argument("--record", type=Path, help=f"write the rows to this JSON file, such as {RECORD.name}")
    parser.add_argument("--short", action="store_true", help="PPO and SFT, one process, three kills each")
    options = parser.parse_args(arguments)
    if options.short:
        options.only, options.kills, options.pair_kills = ["ppo", "sft"], 3, 0
    return options


def punished(trainer: str, root: Path, size: int, tracker: str, *, kills: int, seed: int) -> Row:
    """Runs a trainer until its processes were killed `kills` times, and compares each finished run."""
    row, began = Row(trainer, size), time.monotonic()
    random = Random(f"{seed} {trainer} {size}")
    folder = root / f"{trainer}-{size}"
    straight = folder / "straight"
    took = whole(trainer, straight, size, tracker)
    kinds = cycle(random.sample(KINDS, len(KINDS)))
    while sum(row.kills.values()) < kills and not row.difference:
        run = folder / f"run-{row.runs}"
        run.mkdir(parents=True)
        while sum(row.kills.values()) < kills and not (run / "final-0.pt").exists():
            kind = next(kinds)
            group = Group.start(trainer, run, size=size, tracker=tracker)
            row.starts += 1
            row.kills[kind] += group.strike(kind, random, longest=took)
            statuses = group.wait(PATIENCE)
            row.ended += group.ended
            if unknown := Counter(statuses) - Counter(dict.fromkeys(ENDS, size)):
                row.difference = f"a process ended with status {next(iter(unknown))}; see {run}"
                return row
        if not all((run / f"final-{rank}.pt").exists() for rank in range(size)):
            whole(trainer, run, size, tracker)
            row.starts += 1
        row.runs += 1
        with get_context("fork").Pool(1) as pool:
            row.difference = pool.apply(difference, (run, straight))
    row.seconds = round(time.monotonic() - began, 1)
    return row


def whole(trainer: str, folder: Path, size: int, tracker: str) -> float:
    """Runs a trainer to its end; returns the seconds that it took."""
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    group = Group.start(trainer, folder, size=size, tracker=tracker)
    statuses = group.wait(PATIENCE)
    if any(statuses):
        log = (folder / "log-0.txt").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"{trainer} in {folder} ended with {statuses}:\n{log[-3000:]}")
    return time.monotonic() - began


def table(rows: list[Row]) -> str:
    """Returns the rows as a Markdown table."""
    lines = [
        "| trainer | processes | SIGKILL at random | in a save | SIGTERM | starts | ended | runs | equal | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        kills = " | ".join(str(row.kills[kind]) for kind in KINDS)
        equal = row.difference or "yes"
        lines.append(
            f"| {row.trainer} | {row.processes} | {kills} | {row.starts} | {row.ended} | {row.runs} | {equal} "
            f"| {row.seconds:.0f} |"
        )
    return "\n".join(lines)


def machine() -> list[str]:
    """Returns the number of cores and the versions."""
    packages = [f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate", "diffusers")]
    return [f"{len(os.sched_getaffinity(0))} cores", f"Python {platform.python_version()}", *packages]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
