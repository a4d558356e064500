"""What `trimtab doctor` says of this machine, and of machines on which something is wrong."""

import tomllib
from importlib import metadata
from pathlib import Path

import torch
from packaging.requirements import Requirement

from trimtab_cli.doctor import EXTRAS, fault_of, main

PACKAGES = Path(__file__).resolve().parents[3] / "packages"


def test_the_report_has_versions_devices_extras_and_services(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    rows = dict(line.split(maxsplit=1) for line in text.splitlines() if line.startswith("  "))
    assert rows["torch"] == torch.__version__
    assert rows["transformers"] == metadata.version("transformers")
    assert rows["CPU"].startswith(f"{torch.multiprocessing.cpu_count()} cores")
    assert rows["sweeps"].startswith("optuna") or 'pip install "trimtab-lm[sweeps]"' in rows["sweeps"]
    assert "W&B" in rows
    assert text.splitlines()[-1] == "Nothing is wrong."


def test_every_extra_is_explained():
    projects = [tomllib.loads(file.read_text())["project"] for file in PACKAGES.glob("*/pyproject.toml")]
    assert {extra for project in projects for extra in project["optional-dependencies"]} == set(EXTRAS)


def test_a_cache_that_cannot_be_written_is_a_problem(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/proc/none")
    assert main([]) == 1
    assert "set HF_HOME to a folder that you may write to" in capsys.readouterr().out.splitlines()[-1]


def test_a_version_that_does_not_fit_is_named_with_the_remedy():
    version = metadata.version("pytest")
    assert fault_of(Requirement(f"pytest>={version}")) is None
    assert fault_of(Requirement("pytest>=1000")) == (
        f'pytest {version} is installed, which is too old or too new: pip install "pytest>=1000"'
    )
    assert fault_of(Requirement("no-such-package>=1")) == 'no-such-package is missing: pip install "no-such-package>=1"'


def test_wandb_is_not_logged_in_without_a_key(tmp_path, offline_wandb, monkeypatch, capsys):
    assert main([]) == 0
    assert "WANDB_MODE=offline: nothing is uploaded" in capsys.readouterr().out
