"""Measures both sides of each work in turn, checks that both computed the same, and writes the tables.

    make bench                                      every row; creates each side's environment under .bench/
    make bench ARGS="--only sft dpo --repeats 5"    these rows
    make bench ARGS="--ablations"                   trimtab with and without each shortcut
    make bench ARGS="--only ddpo --profile"         where the time of a trimtab step goes
    make bench ARGS="--device cuda"                 on a GPU, a 1B model in bfloat16
    make bench ARGS="--smoke"                       tiny sizes, to check that everything runs; saves nothing

Each measurement runs in its own process, and the two sides alternate.
"""

import json
import os
import platform
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from datetime import date
from pathlib import Path
from typing import Any

from tools.bench.environments import FOLDER, ROOT, python_of
from tools.bench.table import page, profiles, table
from tools.bench.works import ABLATIONS, OURS, WORKS, Side, Work

RESULTS = Path(__file__).with_name("results.json")
README = Path(__file__).with_name("README.md")
LIMIT = 3600  # seconds that a process may take
# One thread, so that processor time is the time that the work takes; no network; quiet libraries.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    # vLLM: no threads beyond OMP_NUM_THREADS, 1 GiB for keys and values.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
ROUNDING = {"cpu": 0.0, "cuda": 1e-2}  # bfloat16 has three digits


class BenchError(Exception):
    """A process failed, or the two sides computed different results."""


def main(arguments: list[str]) -> int:
    """Runs the works that the arguments select; returns the exit status."""
    options = parsed(arguments)
    size = f"smoke-{options.device}" if options.smoke else options.device
    rows = ABLATIONS if options.ablations else WORKS
    works = [work for work in [*WORKS, *ABLATIONS] if work.name in options.only] if options.only else rows
    started([sys.executable, "-m", "tools.bench.models", size, str(FOLDER / "models" / size)], OURS)
    failed = False
    for work in works:
        try:
            if options.profile:
                shares = report(work, work.ours, size, is_profiled=True)["profile"]
                result = {"work": work.name, "device": options.device, "profile": shares}
                print(profiles([result]), flush=True)
            else:
                pairs = measured(work, options.device, size, options.repeats)
                result = {"work": work.name, "device": options.device, **origin(options.device), "pairs": pairs}
                print(table([work], [result]), flush=True)
            if not options.smoke:
                save(result)
        except BenchError as error:
            failed = True
            print(f"{work.name}: {error}", file=sys.stderr, flush=True)
    return int(failed)


def parsed(arguments: list[str]) -> Namespace:
    """Returns the parsed options."""
    parser = ArgumentParser(prog="tools.bench", description=__doc__)
    names = [work.name for work in [*WORKS, *ABLATIONS]]
    parser.add_argument("--only", nargs="+", choices=names, metavar="WORK", help=", ".join(names))
    parser.add_argument("--repeats", type=int, default=3, help="pairs of processes")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; saves nothing")
    parser.add_argument("--ablations", action="store_true", help="measure what each shortcut saves")
    parser.add_argument("--profile", action="store_true", help="profile trimtab instead of timing pairs")
    options = parser.parse_args(arguments)
    if options.profile and options.device == "cuda":
        parser.error("--profile measures CPU time. Remove --device cuda.")
    return options


def measured(work: Work, device: str, size: str, repeats: int) -> list[dict[str, Any]]:
    """Returns both sides' reports, pair by pair; the sides alternate in running first.

    Raises:
        BenchError: see `started` and `check`.
    """
    pairs = []
    for repeat in range(repeats):
        load = os.getloadavg()[0]
        sides = {"ours": work.ours, "other": work.other}
        order = list(sides) if repeat % 2 == 0 else list(reversed(sides))
        reports = {name: report(work, sides[name], size, pair=repeat) for name in order}
        check(work, reports, rounding=ROUNDING[device])
        pairs.append({"load": load, **reports})
    return pairs


def report(work: Work, side: Side, size: str, *, pair: int = 0, is_profiled: bool = False) -> dict[str, Any]:
    """Returns what one process of a side measures; see tools.bench.process."""
    is_ours = side.environment.startswith(OURS)
    order = {
        "task": work.task,
        "package": "trimtab_lm" if is_ours else "trl",
        "size": size,
        "pair": pair,
        "settings": {**work.settings, **side.settings},
        "folder": str(FOLDER / "models" / size),
        "is_profiled": is_profiled,
    }
    output = started([python_of(side.environment), "-m", "tools.bench.process", json.dumps(order)], side.environment)
    return json.loads(output.splitlines()[-1])


def started(command: list[str], environment: str) -> str:
    """Runs a process on one thread and returns its output; a peer's process cannot import this repository's packages.

    Raises:
        BenchError: the process failed.
    """
    variables = os.environ | ENVIRONMENT
    if not environment.startswith(OURS):
        variables.pop("PYTHONPATH", None)
    try:
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise BenchError(f"{environment} took more than {LIMIT} s") from None
    if done.returncode:
        raise BenchError(f"{environment} failed:\n" + "\n".join(done.stderr.splitlines()[-12:]))
    return done.stdout


def check(work: Work, reports: dict[str, dict[str, Any]], *, rounding: float) -> None:
    """Checks that both sides computed the same.

    Args:
        work: says what must be equal.
        reports: the reports of `ours` and `other`.
        rounding: relative difference allowed in facts that are not counts, whatever the work allows.

    Raises:
        BenchError: a fact that must be equal differs by more than the work allows.
    """
    ours, other = reports["ours"]["facts"], reports["other"]["facts"]
    for name, tolerance in work.equal.items():
        allowed = max(tolerance, rounding) if tolerance else 0.0
        if abs(ours[name] - other[name]) > allowed * abs(other[name]):
            raise BenchError(
                f"the sides differ in {name}: {ours[name]} here and {other[name]} in {work.other.environment}, "
                f"a relative difference above {allowed:g}, so their times cannot be compared"
            )


def save(result: dict[str, Any]) -> None:
    """Replaces the work's line in results.json, and rewrites the README's tables from all lines.

    Raises:
        BenchError: the result is a profile, and the work has no times.
    """
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    lines = {(line["work"], line["device"]): line for line in results}
    key = (result["work"], result["device"])
    lines[key] = {**lines.pop(key, {}), **result}
    if "pairs" not in lines[key]:
        raise BenchError("measure the work's times first: run it without --profile")
    results = list(lines.values())
    RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, results)) + "\n]\n")
    README.write_text(page(README.read_text(), results))


def origin(device: str) -> dict[str, str]:
    """Returns the day, machine and commit of a measurement."""
    commit = started(["git", "rev-parse", "--short", "HEAD"], OURS).strip()
    return {"day": str(date.today()), "machine": machine(device), "commit": commit}


def machine(device: str) -> str:
    """Returns the GPU's name, or the processor and its cores."""
    if device == "cuda":
        return started(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], OURS).strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.machine())} ({os.cpu_count()} cores)"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
