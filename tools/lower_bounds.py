"""Checks that the installed versions are the lower bounds that the packages require (make test-lowest)."""

import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
NOT_INSTALLED_LOW = "torch"  # see the Makefile


def untested_bounds() -> list[str]:
    """Returns a line for each requirement `name>=version` of a package, if another version is installed."""
    lines = set()
    for file in sorted(ROOT.glob("packages/*/pyproject.toml")):
        for text in tomllib.loads(file.read_text())["project"]["dependencies"]:
            requirement = Requirement(text)
            bounds = [Version(spec.version) for spec in requirement.specifier if spec.operator == ">="]
            installed = Version(version(requirement.name))
            if requirement.name != NOT_INSTALLED_LOW and bounds and installed not in bounds:
                lines.add(f"{file.relative_to(ROOT)}: {text}, but the lowest version that installs is {installed}")
    return sorted(lines)


def main() -> None:
    lines = untested_bounds()
    print(*lines or ["Every lower bound is installed."], sep="\n")
    if lines and sys.version_info[:2] == (3, 11):  # later Pythons lack wheels of some of the lowest versions
        sys.exit("Raise these bounds: no test covers them.")


if __name__ == "__main__":
    main()
