"""Checks the wheels' contents (licence, matching versions, readmes without dead links) and the citation.

tests/wheels.py checks the wheels themselves.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from experiments.assets import data, models
from experiments.assets.registry import NODE_WHEEL, Package

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = sorted((ROOT / "packages").iterdir())
EACH_PACKAGE = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


@EACH_PACKAGE
def test_each_package_ships_the_licence_of_the_repository(folder: Path):
    assert project(folder)["license"] == "Apache-2.0"
    assert project(folder)["license-files"] == ["LICENSE"]
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@EACH_PACKAGE
def test_each_package_is_typed_and_has_the_version_of_the_citation(folder: Path):
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (project(folder)["version"], project(folder)["license"])
    assert (folder / "src" / project(folder)["name"].replace("-", "_") / "py.typed").read_text() == ""


def test_the_page_of_licences_names_everything_that_is_shipped_or_downloaded():
    page = (ROOT / "docs" / "licences.md").read_text()
    downloads = [value for module in (data, models) for value in vars(module).values() if isinstance(value, Package)]
    assert len(downloads) >= 7
    assert [str(one) for one in downloads if f"`{one.name}` {one.version}" not in page] == []
    assert f"`{NODE_WHEEL.partition('==')[0]}`" in page
    files = [*ROOT.glob("packages/*/src/**/*.*"), *ROOT.glob("examples/**/*.*"), *ROOT.glob("experiments/**/*.*")]
    lists = {path.name for path in files if path.parent.name == "prompt_lists"}
    weights = [path.relative_to(ROOT).parent for path in files if path.suffix == ".safetensors"]
    assert {name for name in lists if name not in page} == set()
    assert [path for path in weights if not any(str(folder) in page for folder in (path, path.parent))] == []
    assert len(lists) == 2
    assert len(weights) >= 4


@EACH_PACKAGE
def test_packages_need_each_other_in_their_own_version(folder: Path):
    names = {project(other)["name"] for other in FOLDERS}
    needed = [one for one in map(Requirement, project(folder)["dependencies"]) if one.name in names]
    assert [str(one.specifier) for one in needed] == [f"=={project(folder)['version']}"] * len(needed)
    assert len(needed) == {"common": 0, "cli": 2}.get(folder.name, 1)


@EACH_PACKAGE
def test_links_of_a_readme_work_on_a_package_index(folder: Path):
    links = re.findall(r"\]\(([^)]+)\)", (folder / "README.md").read_text())
    assert all(link.startswith(("https://", "#")) for link in links), links
