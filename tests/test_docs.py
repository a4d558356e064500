"""Checks what a machine can check in the pages: links resolve, settings and statistics exist."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from tests.lm import tiny

import trimtab_diffusion
import trimtab_lm
from trimtab_common.tracking import TRACKERS

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("docs", "examples", "experiments", "packages", "tools")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MIGRATION = ROOT / "docs" / "migration.md"


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ +(.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path):
    for target in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def first_cells() -> Iterator[tuple[str, str]]:
    """Yields (config of the heading above, or "", code in the first column) for the migration page's tables."""
    config = ""
    for line in MIGRATION.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            match = re.search(r"`(\w+Config)`", line)
            config = match.group(1) if match else ""
        elif line.startswith("|"):
            yield from ((config, code) for code in re.findall(r"`([^`]+)`", line.split("|")[1]))


def names_of(config: str) -> tuple[set[str], set[str]]:
    """Returns a config's and its trainer's settings (fields, and parameters of public methods), and their methods."""
    package = trimtab_diffusion if config == "DDPOConfig" else trimtab_lm
    trainer = getattr(package, config.replace("Config", "Trainer"))
    methods = dict(inspect.getmembers(trainer, inspect.isroutine))
    public = [trainer, *(method for name, method in methods.items() if name[0] != "_")]
    parameters = {name for method in public for name in inspect.signature(method).parameters}
    return parameters | {field.name for field in fields(getattr(package, config))}, set(methods)


def test_settings_and_methods_of_the_migration_page_exist():
    unknown, checked = [], 0
    for config, code in first_cells():
        parts = re.fullmatch(r"([a-z_][a-z0-9_]*)(\(\)|=.*)?", code)
        if not config or parts is None:
            continue
        settings, methods = names_of(config)
        if parts.group(1) not in (methods if parts.group(2) == "()" else settings):
            unknown.append(f"{config}: {code}")
        checked += 1
    assert unknown == []
    assert checked > 80


def test_statistics_of_ppo_on_the_migration_page_exist():
    stats = tiny.ppo().step(*tiny.batch())
    named = [code for config, code in first_cells() if config == "PPOConfig" and "/" in code]
    assert len(named) > 10
    assert [name for name in named if name not in stats] == []


@pytest.mark.parametrize("config", [trimtab_lm.PPOConfig, trimtab_diffusion.DDPOConfig])
def test_the_help_of_log_with_names_every_tracker(config: type):
    help_text = next(field.metadata["help"] for field in fields(config) if field.name == "log_with")
    assert set(help_text.removeprefix("Tracker: ").removesuffix(".").split(", ")) == set(TRACKERS)
