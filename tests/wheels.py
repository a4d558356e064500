"""Checks what a user of the wheels gets. `make release` runs this file with the packages installed from wheels."""

import os
import subprocess
import sys
import tarfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tests.cli.conftest import write_rows
from tests.cli.formats import ROWS
from tests.lm import tiny

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


@pytest.mark.parametrize("name", ROWS)
def test_one_command_trains_a_base_model_on_a_file_as_people_have_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, row = ROWS[name]
    write_rows("rows.jsonl", [row] * 4)
    tiny.gpt2(n_positions=256).save_pretrained("base")
    tiny.tokenizer().save_pretrained("base")
    trimtab = Path(sys.executable).with_name("trimtab")
    flags = ("--max_length=256", "--max_steps=1", "--per_device_train_batch_size=2", "--output_dir=out")
    words = (trimtab, command, "--model=base", "--dataset=rows.jsonl", "--chat_template=chatml", *flags)
    alone = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("Settings: learning_rate ")
    assert last.startswith("The model is in out.")
    assert (tmp_path / "out" / "model.safetensors").exists()
