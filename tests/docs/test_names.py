"""The pages name only what exists, and the reference lists all of it."""

import importlib
import re
from dataclasses import fields
from pathlib import Path

import pytest
from tests.docs.blocks import ROOT
from tests.docs.test_metrics import explained
from transformers import TrainingArguments
from transformers.training_args import OptimizerNames

from trimtab_common.tracking import TRACKERS

PACKAGES = ("trimtab_common", "trimtab_diffusion", "trimtab_lm", "trimtab_lm.environments")
OTHERS = {
    "migration.md",
    "migration-others.md",
    "reliability.md",
    "licences.md",
    "gpu.md",
}  # these pages also name things outside the project
PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name not in OTHERS)
SOURCES = ("packages", "examples", "experiments", "tools", "configs")
ENDINGS = {".py", ".toml", ".yaml", ".yml", ".sh"}
ELSEWHERE = {
    "CUBLAS_WORKSPACE_CONFIG",
    "use_deterministic_algorithms",
    "WANDB_MODE",
    "dynamo_backend",
    "num_frames",
    "TERM",
    "stage3_gather_16bit_weights_on_model_save",
    "zero_to_fp32",
}
"""Names of other libraries and programs."""


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_has_every_public_name(package: str):
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    listed = set(re.findall(rf"^::: {re.escape(package)}\.(\w+)$", text, flags=re.MULTILINE))
    assert listed == set(importlib.import_module(package).__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_one_title_and_a_text(page: Path):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"^# \S", text, flags=re.MULTILINE)) == 1
    assert len(text.splitlines()) > 8


def known_words() -> set[str]:
    """Returns the words of the sources and of the pages' own code, and the settings inherited from transformers."""
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in ENDINGS]
    files += [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "mkdocs.yml"]
    words = (
        ELSEWHERE
        | {*TRACKERS}
        | {field.name for field in fields(TrainingArguments)}
        | {name.value for name in OptimizerNames}
    )
    metrics = " ".join(name for page in (ROOT / "docs" / "trainers").glob("*.md") for name in explained(page))
    words |= {f"{prefix}{word}" for word in re.findall(r"\w+", metrics) for prefix in ("", "eval_")}
    for path in files:
        words |= set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return words


def named_in(page: Path) -> set[str]:
    """Returns the words of four or more letters that a page formats as code in sentences and tables."""
    text = page.read_text(encoding="utf-8")
    code = re.findall(r"^ *```.*?^ *```$", text, flags=re.DOTALL | re.MULTILINE)
    for block in code:
        text = text.replace(block, "")
    inline = " ".join(re.findall(r"`([^`\n]+)`", text))
    return set(re.findall(r"[A-Za-z_]\w{3,}", inline)) - set(re.findall(r"\w+", " ".join(code)))


WORDS = known_words()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_sets_in_code_exists_in_the_sources(page: Path):
    assert named_in(page) - WORDS == set()


def test_a_setting_that_does_not_exist_is_seen(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("Set `learning_rate`, `warp_factor=9` and `x`.\n\n```python\nwarped = 1\n```\n\n`warped`\n")
    assert named_in(page) - WORDS == {"warp_factor"}
