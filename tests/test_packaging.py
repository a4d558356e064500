"""What goes into the wheels: the licence, versions that fit each other, and readmes without dead links."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

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
def test_packages_need_each_other_in_their_own_version(folder: Path):
    names = {project(other)["name"] for other in FOLDERS}
    needed = [one for one in map(Requirement, project(folder)["dependencies"]) if one.name in names]
    assert [str(one.specifier) for one in needed] == [f"=={project(folder)['version']}"] * len(needed)
    assert len(needed) == (folder.name != "common")


@EACH_PACKAGE
def test_links_of_a_readme_work_on_a_package_index(folder: Path):
    links = re.findall(r"\]\(([^)]+)\)", (folder / "README.md").read_text())
    assert all(link.startswith(("https://", "#")) for link in links), links
