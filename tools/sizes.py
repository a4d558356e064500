"""Lines per package, tests against code, and which files and functions are too long to read in one sitting."""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE_LIMIT = 400
FUNCTION_LIMIT = 80


def sources(folder: Path) -> list[Path]:
    """The Python files under a folder, without those in hidden folders and caches."""
    return sorted(
        path
        for path in folder.rglob("*.py")
        if not any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(folder).parts)
    )


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def functions(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, first line and length of every function in a file, decorators and nested functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield node.name, first, (node.end_lineno or node.lineno) - first + 1


def too_long(paths: list[Path], root: Path) -> list[str]:
    """One line per file over FILE_LIMIT and per function over FUNCTION_LIMIT, longest first within each kind."""
    files = [(lines(path), str(path.relative_to(root))) for path in paths]
    parts = [
        (length, f"{path.relative_to(root)}:{first} {name}")
        for path in paths
        for name, first, length in functions(path)
    ]
    long_files = [f"{n:6d} lines  {name}" for n, name in sorted(files, reverse=True) if n > FILE_LIMIT]
    long_parts = [f"{n:6d} lines  {name}" for n, name in sorted(parts, reverse=True) if n > FUNCTION_LIMIT]
    return long_files + long_parts


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a file or a function is over its limit")
    check = parser.parse_args(argv).check

    groups = {f"packages/{path.name}": sources(path) for path in sorted((root / "packages").glob("*"))}
    groups |= {name: sources(root / name) for name in ("experiments", "tools", "tests")}
    totals = {name: sum(map(lines, paths)) for name, paths in groups.items()}
    code, tests = sum(n for name, n in totals.items() if name.startswith("packages/")), totals["tests"]
    for name, paths in groups.items():
        print(f"{totals[name]:6d} lines in {len(paths):3d} files  {name}")
    print(f"tests to packages: {tests} to {code}" + (f", {tests / code:.2f} to 1" if code else ""))

    findings = too_long([path for paths in groups.values() for path in paths], root)
    print(
        f"\nfiles over {FILE_LIMIT} lines and functions over {FUNCTION_LIMIT}:",
        *(findings or ["  none"]),
        sep="\n",
    )
    return 1 if check and findings else 0


if __name__ == "__main__":
    sys.exit(main())
