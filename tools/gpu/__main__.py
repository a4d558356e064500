"""Runs the parts that need a GPU, each in its own process, and writes docs/gpu.md.

    python -m tools.gpu                        # the parts that the record lacks at this commit
    python -m tools.gpu --parts sft ppo        # these parts
    python -m tools.gpu --device cpu           # all parts at their smallest size; leaves docs/ as it is

The next call repeats an interrupted part, and keeps the results already recorded.
"""

import json
import platform
import resource
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from tools.gpu.models import Size
from tools.gpu.parts import PARTS

ROOT = Path(__file__).parents[2]
LIMIT = 480  # seconds that a part may take
VERSIONS = ("torch", "transformers", "accelerate", "peft", "diffusers", "vllm", "deepspeed", "bitsandbytes")

BEGIN = "<!-- what follows is written by make gpu -->"

Record = dict[str, dict[str, Any]]
"""Result, seconds, peak memory, figures, commit, day and machine of each part, by its name."""


def main() -> int:
    """Runs what the arguments ask for; returns the exit status."""
    options = parsed(sys.argv[1:])
    if options.run is not None:
        print(json.dumps(measured(options.run, Size(options.device, options.small))))
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU. Run on a machine with one, or try the parts with ARGS='--device cpu'.")
        return 2
    file = options.record or (ROOT / "docs/gpu.json" if options.device == "cuda" else ROOT / "runs/gpu.json")
    record: Record = json.loads(file.read_text()) if file.exists() else {}
    commit = output_of("git", "rev-parse", "--short", "HEAD")
    for name in options.parts or PARTS:
        if not options.parts and record.get(name, {}).get("commit") == commit:
            continue
        record[name] = {
            "commit": commit,
            "day": str(date.today()),
            "machine": machine(options.device),
            **attempt(name, Size(options.device, options.small)),
        }
        print(f"{name}: {record[name]['result']} ({record[name].get('seconds', 0):.0f} s)", flush=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record, indent=1) + "\n")
        written = file.with_suffix(".md")
        written.write_text(page(written.read_text() if written.exists() else "", record))
    return int(any(entry["result"].startswith("failed") for entry in record.values()))


def parsed(arguments: list[str]) -> Namespace:
    """Returns the parsed options; on a CPU, chooses the smallest size."""
    parser = ArgumentParser(prog="python -m tools.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where the parts run")
    parser.add_argument("--parts", nargs="+", choices=PARTS, metavar="PART", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--small", action="store_true", help="the smallest size, on a GPU too")
    parser.add_argument("--record", type=Path, help="JSON file of the record; its page is written beside it")
    parser.add_argument("--run", choices=PARTS, metavar="PART", help="run one part in this process, print its figures")
    options = parser.parse_args(arguments)
    options.small = options.small or options.device == "cpu"
    return options


def attempt(name: str, size: Size) -> dict[str, Any]:
    """Runs a part in its own process, which gives it its own memory and confines a crash to it."""
    if reason := PARTS[name].missing(size):
        return {"result": f"not run: {reason}"}
    options = ["--device", size.device, *(["--small"] if size.is_small else [])]
    command = [sys.executable, "-m", "tools.gpu", "--run", name, *options]
    start = time.perf_counter()
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"result": f"failed: it took longer than {LIMIT} s"}
    seconds = time.perf_counter() - start
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"]
        return {"result": f"failed: {lines[-1]}", "seconds": seconds, "log": lines[-30:]}
    return {"result": "passed", "seconds": seconds, **json.loads(ended.stdout.strip().splitlines()[-1])}


def measured(name: str, size: Size) -> dict[str, Any]:
    """Runs a part in this process; returns its figures and its peak memory in GiB."""
    figures = PARTS[name].run(size)
    if size.device == "cuda":
        return {"figures": figures, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    return {"figures": figures, "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}


def machine(device: str) -> str:
    """Describes the machine and the versions in one line."""
    chip = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    versions = [f"{name} {found}" for name in VERSIONS if (found := installed(name))]
    return f"{chip}, Python {platform.python_version()}, {', '.join(versions)}"


def installed(package: str) -> str | None:
    """Returns a package's version; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def output_of(*command: str) -> str:
    """Returns what a command prints."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def page(text: str, record: Record) -> str:
    """Returns a page's text with a newly written table of all parts."""
    nothing = {"result": "not run", "commit": "", "day": "", "machine": ""}
    rows = [
        f"| `{name}` | {PARTS[name].what} | {entry['result']} | {entry.get('seconds', 0):.0f} "
        f"| {entry.get('peak_gib', 0):.1f} | {', '.join(f'{k} {v:.4g}' for k, v in entry.get('figures', {}).items())} "
        f"| {entry['commit']} {entry['day']} |"
        for name in PARTS
        for entry in [record.get(name, nothing)]
    ]
    machines = sorted({entry["machine"] for entry in record.values()})
    lines = [
        text.partition(BEGIN)[0] + BEGIN,
        "",
        "Each part runs in its own process: `python -m tools.gpu --run PART`. Models have random weights and the sizes",
        "of Llama 3.2 1B and Stable Diffusion 1.5, unless a part says otherwise.",
        "",
        f"Machine: {'; '.join(machines)}.",
        "",
        "| part | work | result | seconds | peak GiB | figures | commit |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *rows,
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
