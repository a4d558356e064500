"""Every target of `make help` runs in CI, or is recorded with the command and the date of its last pass."""

import json
from datetime import date, timedelta

import pytest
from tools.targets import RECORD, ROOT, documented, run_by_ci, shortcomings

MAKEFILE = "test: $(STAMP) ## run the tests\nlong-runs: ## a thousand steps\nhelp: ## list\n$(PY):\n\t@true\n"
SCRIPT = "set -e\ntargets=(test help)\nif true; then targets+=(long-runs); fi\n"


def test_every_target_of_the_makefile_runs_in_ci_or_is_recorded():
    makefile, script = (ROOT / "Makefile").read_text(), (ROOT / ".ci" / "run").read_text()
    assert len(documented(makefile)) > 20
    assert "test" in run_by_ci(script)
    assert set(run_by_ci(script)) <= set(documented(makefile))
    assert shortcomings(makefile, script, json.loads(RECORD.read_text())) == []


def test_a_target_that_nothing_runs_is_named():
    (line,) = shortcomings(MAKEFILE, SCRIPT, {})
    assert line.startswith("long-runs: CI does not run it")


@pytest.mark.parametrize(
    "entry",
    [
        {"command": "make long-runs", "passed": "2026-11-20"},
        {"command": "make demo long-runs ARGS='--short'", "passed": "2026-11-20"},
        {"command": "make long-runs", "reason": "needs a GPU"},
    ],
)
def test_a_command_with_its_date_or_its_reason_is_enough(entry: dict[str, str]):
    assert shortcomings(MAKEFILE, SCRIPT, {"long-runs": entry}) == []


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("long-runs", {"command": "make demo", "passed": "2026-11-20"}),
        ("long-runs", {"command": "make long-runs"}),
        ("long-runs", {"command": "make long-runs", "passed": "yesterday"}),
        ("long-runs", {"command": "make long-runs", "passed": f"{date.today() + timedelta(days=2)}"}),
        ("test", {"command": "make test", "passed": "2026-11-20"}),
        ("gone", {"command": "make gone", "passed": "2026-11-20"}),
    ],
)
def test_an_entry_that_says_too_little_or_too_much_is_named(name: str, entry: dict[str, str]):
    good = {"long-runs": {"command": "make long-runs", "passed": "2026-11-20"}}
    (line,) = shortcomings(MAKEFILE, SCRIPT, {**good, name: entry})
    assert line.startswith(f"{name}: ")
