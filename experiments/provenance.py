"""What a run was started from: the commit, the versions, the machine, the command and the day."""

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("torch", "transformers", "diffusers")


def provenance() -> dict[str, Any]:
    """Describes this process: commit, is_changed, day, machine, python, versions and command."""
    commit, is_changed = _commit()
    return {
        "commit": commit,
        "is_changed": is_changed,
        "day": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{len(os.sched_getaffinity(0))} {platform.machine()} cores",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in LIBRARIES},
        "command": _command(),
    }


@cache
def _commit() -> tuple[str, bool]:
    """The short hash of the checkout, or unknown; and whether tracked files differ from it."""
    git = ["git", "-C", str(ROOT)]
    commit, changed = (
        subprocess.run([*git, *words], capture_output=True, text=True, check=False).stdout.strip()
        for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    )
    return commit or "unknown", bool(changed)


def _command() -> list[str]:
    """The words of the command line, with paths inside the checkout relative to it."""
    words = (Path(word) for word in sys.argv)
    return [str(word.relative_to(ROOT) if word.is_relative_to(ROOT) else word) for word in words]


def in_words(abouts: Sequence[Mapping[str, Any]]) -> str:
    """Says where runs were made; names every value where they differ.

    Args:
        abouts: What `provenance` returned for each run.
    """
    commits = _values(
        f"{about['commit']}{' with uncommitted changes' if about['is_changed'] else ''}" for about in abouts
    )
    versions = _values(", ".join(f"{name} {number}" for name, number in about["versions"].items()) for about in abouts)
    machines, pythons = (_values(about[name] for about in abouts) for name in ("machine", "python"))
    days = _values(sorted(about["day"] for about in abouts))
    return f"Commit {commits}; {days}; {machines}; Python {pythons}; {versions}."


def _values(texts: Any) -> str:
    """The texts without repetitions, as "a, b and c"."""
    *firsts, last = dict.fromkeys(map(str, texts))
    return f"{', '.join(firsts)} and {last}" if firsts else last
