"""Prints the size of the tree: lines per package, overlong files and functions, duplicates and types."""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE_LIMIT = 400
FUNCTION_LIMIT = 80
RUN = 6
"""Minimum number of consecutive equal lines that count as a duplicate."""
ALGORITHMS = (
    *(f"lm/src/trimtab_lm/{name}" for name in ("sft", "reward", "dpo", "kto", "grpo", "ppo", "iterative_sft")),
    "diffusion/src/trimtab_diffusion/ddpo",
)
STORY = ("config.py", "loss.py", "trainer.py")
LOOKUPS, ANY = r"\b(?:getattr|hasattr)\(", r"\bAny\b"
FORMATTER_OFF = "# fmt" + ": skip"
HOOKS = {"_no_split_modules"}
"""Private names that the packages define for another library; they read them of their own models in `compat` alone."""
PUBLIC = {"_replace", "_fields", "_asdict", "_exit", "_typeshed"}
"""Documented names that begin with an underscore: those of named tuples, os._exit, the types in typeshed."""


def sources(folder: Path) -> list[Path]:
    """Returns the Python files under a folder, apart from hidden folders and caches."""
    return sorted(
        path
        for path in folder.rglob("*.py")
        if not any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(folder).parts)
        and path.is_file()  # the built documentation has folders with names of programs
    )


def lines(path: Path) -> int:
    """Returns the number of lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def functions(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yields name, first line and length of each function in a file, with its decorators and nested functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield node.name, first, (node.end_lineno or node.lineno) - first + 1


def too_long(paths: list[Path], root: Path) -> list[str]:
    """Returns a line for each file over FILE_LIMIT, then one for each function over FUNCTION_LIMIT, longest first."""
    files = [(lines(path), str(path.relative_to(root))) for path in paths]
    parts = [
        (length, f"{path.relative_to(root)}:{first} {name}")
        for path in paths
        for name, first, length in functions(path)
    ]
    long_files = [f"{n:6d} lines  {name}" for n, name in sorted(files, reverse=True) if n > FILE_LIMIT]
    long_parts = [f"{n:6d} lines  {name}" for n, name in sorted(parts, reverse=True) if n > FUNCTION_LIMIT]
    return long_files + long_parts


def per_thousand(paths: list[Path], pattern: str) -> float:
    """Returns how often a pattern occurs per 1000 lines of code."""
    matches = sum(len(re.findall(pattern, path.read_text(encoding="utf-8"))) for path in paths)
    return 1000 * matches / max(sum(map(lines, paths)), 1)


def imports(path: Path, modules: Mapping[str, Path]) -> set[str]:
    """Returns the modules of the packages that a file imports, under TYPE_CHECKING too."""
    name = next(name for name, other in modules.items() if other == path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return {other for other in names if other in modules and other != name}


def circles(paths: list[Path], root: Path) -> list[str]:
    """Returns the pairs of modules that import each other, apart from the packages' `__init__`."""
    modules = {
        ".".join(path.relative_to(root).with_suffix("").parts).split(".src.")[-1]: path
        for path in paths
        if path.name != "__init__.py"
    }
    graph = {name: imports(path, modules) for name, path in modules.items()}
    return sorted(f"{one} <-> {other}" for one in graph for other in graph[one] if one < other and one in graph[other])


def statements(path: Path) -> list[tuple[int, str]]:
    """Returns the lines of code of a file with their numbers, without indentation.

    Omits what cannot be shared: imports, function signatures (`def` to the colon), docstrings, comments, empty lines
    and lines of up to three characters, which are brackets.
    """
    source = path.read_text(encoding="utf-8")
    excluded: set[int] = set()
    for node in ast.walk(ast.parse(source, filename=str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            excluded |= set(range(node.lineno, max(node.body[0].lineno, node.lineno + 1)))
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            excluded |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    stripped = ((number, line.strip()) for number, line in enumerate(source.splitlines(), start=1))
    return [(n, line) for n, line in stripped if n not in excluded and len(line) > 3 and not line.startswith("#")]


def duplicate_runs(paths: list[Path], root: Path) -> list[str]:
    """Returns a line for each copy of a run of RUN or more statements that also occurs earlier.

    A run is as long as possible, and counts once at any length. A run in three places has two copies.
    """
    code = {path: statements(path) for path in paths}
    places: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    for path, rows in code.items():
        for i in range(len(rows) - RUN + 1):
            places[tuple(line for _, line in rows[i : i + RUN])].append((path, i))
    pairs = {(one, other) for spots in places.values() for one in spots for other in spots if one < other}
    starts = sorted(((a, i), (b, j)) for (a, i), (b, j) in pairs if ((a, i - 1), (b, j - 1)) not in pairs)
    first_of = {copy: first for first, copy in reversed(starts)}

    def name(place: tuple[Path, int]) -> str:
        path, i = place
        return f"{path.relative_to(root)}:{code[path][i][0]}"

    return [f"{name(copy)} repeats {name(first)}" for copy, first in sorted(first_of.items())]


def private_names(paths: list[Path], root: Path) -> list[str]:
    """Returns the uses of other libraries' private names outside `compat` folders: attributes, imports and getattr.

    Does not distinguish names that the packages define themselves from those of another library.
    """
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    own = {name for tree in trees.values() for node in ast.walk(tree) for name in defined(node)} - HOOKS | PUBLIC
    found = []
    for path, tree in trees.items():
        if "compat" not in path.parts:
            for node in ast.walk(tree):
                used = {name for name in mentioned(node) if name.startswith("_") and not name.endswith("__")}
                found += [
                    f"{path.relative_to(root)}:{getattr(node, 'lineno', 0)} {name}" for name in sorted(used - own)
                ]
    return found


def defined(node: ast.AST) -> Iterator[str]:
    """Yields the names that a statement or an assignment to an attribute of `self` defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
        yield node.attr


def mentioned(node: ast.AST) -> Iterator[str]:
    """Yields the names of attributes, of `getattr` and its like, and of imports from other packages."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
        yield from (word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str))
    elif isinstance(node, ast.ImportFrom) and not node.level and not (node.module or "").startswith("trimtab"):
        yield from [*(node.module or "").split("."), *(alias.name for alias in node.names)]


def figures(root: Path) -> list[tuple[str, str]]:
    """Returns the figures of the packages by name."""
    paths = sources(root / "packages")
    longest = max(paths, key=lines)
    story = {}
    for name in ALGORITHMS:
        files = (root / "packages" / name / file for file in STORY)
        story[name.rpartition("/")[2]] = sum(lines(path) for path in files if path.is_file())
    pairs, repeats, private = circles(paths, root), duplicate_runs(paths, root), private_names(paths, root)
    return [
        ("longest file in packages", f"{lines(longest)} ({longest.relative_to(root)})"),
        ("config + loss + trainer", ", ".join(f"{name} {count}" for name, count in story.items())),
        (f"duplicate runs of {RUN} lines", "".join([str(len(repeats)), *(f"\n    {repeat}" for repeat in repeats)])),
        ("private names outside compat", "".join([str(len(private)), *(f"\n    {name}" for name in private)])),
        ("import circles", ", ".join(pairs) or "none"),
        ("getattr + hasattr per 1000 lines", f"{per_thousand(paths, LOOKUPS):.1f}"),
        ("Any per 1000 lines", f"{per_thousand(paths, ANY):.0f}"),
        ("fmt: skip", str(sum(path.read_text(encoding="utf-8").count(FORMATTER_OFF) for path in sources(root)))),
    ]


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Prints all figures. Returns 1 if --check was passed and a file or function is too long, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a file or a function is over its limit")
    check = parser.parse_args(argv).check

    groups = {f"packages/{path.name}": sources(path) for path in sorted((root / "packages").glob("*"))}
    groups |= {name: sources(root / name) for name in ("experiments", "tools", "tests")}
    totals = {name: sum(map(lines, paths)) for name, paths in groups.items()}
    code, tests = sum(n for name, n in totals.items() if name.startswith("packages/")), totals["tests"]
    without = code - totals.get("packages/cli", 0)
    for name, paths in groups.items():
        print(f"{totals[name]:6d} lines in {len(paths):3d} files  {name}")
    print(f"tests to packages: {tests} to {code}" + (f", {tests / code:.2f} to 1" if code else ""))

    print(f"lines of packages: {code}, without cli {without}")

    print("\nfigures of packages:")
    for name, value in figures(root):
        print(f"  {name}: {value}")
    findings = too_long([path for paths in groups.values() for path in paths], root)
    print(
        f"\nfiles over {FILE_LIMIT} lines and functions over {FUNCTION_LIMIT}:",
        *(findings or ["  none"]),
        sep="\n",
    )
    return 1 if check and findings else 0


if __name__ == "__main__":
    sys.exit(main())
