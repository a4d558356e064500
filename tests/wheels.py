"""Checks what a user of the wheels gets. `make release` runs this file with the packages installed from wheels."""

import tarfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("trimtab-common", "trimtab-lm", "trimtab-diffusion", "trimtab-cli")
EACH = pytest.mark.parametrize("name", NAMES)


def installed(name: str) -> Distribution:
    found = distribution(name)
    module = Path(str(found.locate_file(name.replace("-", "_"))))
    assert module.is_dir()
    assert "site-packages" in module.parts, f"{name} is not installed from its wheel"
    return found


@EACH
def test_a_wheel_holds_the_licence_the_mark_of_types_and_every_file_of_the_package(name):
    wheel = installed(name)
    files = {str(file) for file in wheel.files or ()}
    package, folder = name.replace("-", "_"), ROOT / "packages" / name.removeprefix("trimtab-")
    assert wheel.metadata["License-Expression"] == "Apache-2.0"
    (licence,) = (file for file in wheel.files or () if file.name == "LICENSE")
    assert licence.read_text() == (ROOT / "LICENSE").read_text()
    assert f"{package}/py.typed" in files
    sources = (folder / "src").rglob("*")
    wanted = {str(path.relative_to(folder / "src")) for path in sources if path.is_file()}
    assert {path for path in wanted if "__pycache__" not in path} <= files
    assert not any(path.startswith(("tests", "experiments", "tools")) for path in files)


@EACH
def test_a_wheel_needs_the_others_in_its_version(name):
    wheel = installed(name)
    needed = [Requirement(line) for line in wheel.requires or ()]
    others = {one.name: str(one.specifier) for one in needed if one.name in NAMES}
    wanted = {"trimtab-common": set(), "trimtab-cli": set(NAMES) - {name}}.get(name, {"trimtab-common"})
    assert others == dict.fromkeys(wanted, f"=={wheel.version}")


@EACH
def test_a_source_distribution_can_be_built_and_read_alone(name):
    (archive,) = (ROOT / "dist").glob(f"{name.replace('-', '_')}-{installed(name).version}.tar.gz")
    with tarfile.open(archive) as opened:
        files = {path.partition("/")[2] for path in opened.getnames()}
    package = f"src/{name.replace('-', '_')}"
    assert {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO"} <= files
    assert {f"{package}/__init__.py", f"{package}/py.typed"} <= files
