"""Warns of releases newer than those recorded in tools/newest.txt (make test-newest)."""

import subprocess
import sys
from pathlib import Path

from packaging.version import Version

RECORD = Path(__file__).with_name("newest.txt")
WATCHED = ("accelerate", "datasets", "diffusers", "peft", "transformers")


def newest_release(name: str) -> Version | None:
    """Returns the newest release that pip finds for this Python; None if pip reaches no index."""
    command = [sys.executable, "-m", "pip", "index", "versions", name]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return Version(lines[0].split("(")[1].rstrip(")")) if lines else None


def main() -> None:
    recorded = dict(line.split("==") for line in RECORD.read_text().split() if "==" in line)
    for name in WATCHED:
        newest = newest_release(name)
        if newest is None:
            print(f"pip finds no releases of {name}: {recorded[name]} may not be the newest.")
        elif newest > Version(recorded[name]):
            print(f"WARNING: {name} {newest} is out; {recorded[name]} is tested. Run make newest and make test-newest.")


if __name__ == "__main__":
    main()
