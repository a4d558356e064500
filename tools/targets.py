"""Runs make targets that CI omits, in a fresh clone of HEAD, and records in targets.json when each passed.

    python -m tools.targets                    # every recorded target that has a date
    python -m tools.targets test-vllm audit    # these targets

A failed target keeps the date of its last pass, and the program exits with 1.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from datetime import date, timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tools" / "targets.json"


def documented(makefile: str) -> list[str]:
    """Returns the targets that `make help` lists."""
    return re.findall(r"^([a-z-]+):.*## ", makefile, flags=re.MULTILINE)


def run_by_ci(script: str) -> list[str]:
    """Returns the targets in the lists of .ci/run that begin at the left margin: those whose environment it builds."""
    return " ".join(re.findall(r"^\w+=\(([^)]*)\)", script, flags=re.MULTILINE)).split()


def shortcomings(makefile: str, script: str, record: dict[str, dict[str, str]]) -> list[str]:
    """Returns a line for each target that neither CI nor the record covers, and for each faulty entry of the record.

    An entry has the command, and the date of its last pass on a fresh clone or the reason why there is none.
    """
    targets, ci = documented(makefile), run_by_ci(script)
    lines = [f"{name}: CI does not run it; record it with `python -m tools.targets {name}`" for name in targets]
    lines = [line for line, name in zip(lines, targets, strict=True) if name not in ci and name not in record]
    for name, entry in record.items():
        if name not in targets or name in ci:
            lines.append(f"{name}: remove its record, {'CI runs it' if name in ci else 'make help does not list it'}")
        elif not re.search(rf"\bmake (.* )?{name}\b", entry.get("command", "")):
            lines.append(f"{name}: its command is {entry.get('command')!r}, which does not make it")
        elif not (_is_past(entry.get("passed", "")) or entry.get("reason")):
            lines.append(f"{name}: add the date of its last pass, or the reason why there is none")
    return lines


def _is_past(text: str) -> bool:
    """Whether a text is a date that has begun in some time zone."""
    latest = date.today() + timedelta(days=1)
    return re.fullmatch(r"\d{4}-\d\d-\d\d", text) is not None and date.fromisoformat(text) <= latest


def main() -> None:
    record = json.loads(RECORD.read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="default: every recorded target that has a date")
    names = parser.parse_args().targets or [name for name, entry in record.items() if "reason" not in entry]
    failed = []
    with tempfile.TemporaryDirectory(prefix="trimtab-targets-") as folder:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), folder], check=True)
        commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=folder, text=True).strip()
        for name in names:
            entry = record.setdefault(name, {"command": f"make {name}"})
            start = time.monotonic()
            status = subprocess.run(["bash", "-c", entry["command"]], cwd=folder, stdin=subprocess.DEVNULL).returncode
            minutes = (time.monotonic() - start) / 60
            print(f"{entry['command']}: exit {status} after {minutes:.1f} minutes", flush=True)
            if status:
                failed.append(name)
                continue
            entry |= {"passed": f"{date.today()}", "commit": commit, "minutes": f"{minutes:.1f}"}
            entry.pop("reason", None)
            RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=2) + "\n")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
