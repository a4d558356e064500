"""The hosted CI calls only make targets, and every one that .ci/run calls."""

import yaml
from tools.targets import ROOT, documented, run_by_ci

JOBS = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
TARGETS = JOBS["make"]["strategy"]["matrix"]["target"]
NO_TESTS = {"help", "sizes"}


def commands() -> list[str]:
    return [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step]


def test_each_job_calls_make_once():
    assert [command.split()[0] for command in commands()] == ["make"] * len(JOBS)


def test_the_targets_exist():
    words = [word for command in commands() if "{{" not in command for word in command.split()[1:]]
    named = {word for word in words if "=" not in word}
    assert named | set(TARGETS) <= set(documented((ROOT / "Makefile").read_text()))


def test_every_night_the_newest_releases_are_installed_on_the_oldest_and_the_newest_python():
    newest, make = JOBS["newest-releases"], JOBS["make"]
    assert newest["strategy"]["matrix"]["python"] == make["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert "schedule" in newest["if"]


def test_no_target_of_ci_is_left_out():
    assert set(TARGETS) == set(run_by_ci((ROOT / ".ci" / "run").read_text())) - NO_TESTS
