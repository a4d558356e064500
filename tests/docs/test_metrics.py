"""The trainers' pages explain every name that tiny runs log, and no other."""

import re
from pathlib import Path

import pytest
from tests.docs.blocks import ROOT
from tests.docs.runs import RUNS

TRAINERS = ROOT / "docs" / "trainers"
ON_TRANSFORMERS = ("sft", "reward", "dpo", "kto", "grpo", "iterative-sft")
HEALTH = "health/<condition>"
NOT_IN_A_TINY_RUN = {
    "ppo": {HEALTH, "ppo/sampling/steps_behind", "ppo/policy/overflowed"},  # a fault; a vLLM server; fp16
    "grpo": {HEALTH, "sampling/steps_behind"},
    "ddpo": {HEALTH, "policy/overflowed"},
    "diffusion-nft": {HEALTH, "policy/overflowed"},
    "alignprop": {"policy/overflowed"},
    "diffusion-dpo": {"policy/overflowed"},
}


def explained(page: Path) -> set[str]:
    """Returns the names in the first table column under the page's headings that begin with Metrics."""
    names, is_metrics = set(), False
    for line in page.read_text(encoding="utf-8").splitlines():
        is_metrics = line.startswith("## Metrics") if line.startswith("## ") else is_metrics
        if is_metrics and line.startswith("| `"):
            names |= set(re.findall(r"`([^`]+)`", line.split(" | ")[0]))
    return names


def pattern(name: str) -> str:
    """Returns a regular expression for a name, in which <words> stand for any name."""
    return re.sub(r"<\w+>", r"[^/]+", name)


def differences(page: set[str], logged: set[str]) -> tuple[set[str], set[str]]:
    """Returns the logged names that the page does not explain, and the page's names that no run logs."""
    plain = {name if name in page else name.removeprefix("eval_") for name in logged}
    rest, kinds = plain - page, page - plain
    unexplained = {name for name in rest if not any(re.fullmatch(pattern(kind), name) for kind in kinds)}
    return unexplained, {kind for kind in kinds if not any(re.fullmatch(pattern(kind), name) for name in rest)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("trainer", RUNS)
def test_the_page_of_a_trainer_explains_every_metric_that_it_logs(trainer: str, tmp_path: Path):
    own = explained(TRAINERS / f"{trainer}.md")
    shared = explained(TRAINERS / "index.md") if trainer in ON_TRANSFORMERS else set()
    unexplained, invented = differences(own | shared, RUNS[trainer](tmp_path))
    assert unexplained == set()
    assert invented & own == NOT_IN_A_TINY_RUN.get(trainer, set())


def test_shared_metrics_are_those_of_a_run(tmp_path: Path):
    shared = explained(TRAINERS / "index.md")
    assert len(shared) > 10
    assert differences(shared, RUNS["sft"](tmp_path))[1] == set()


def test_differences_are_found_in_both_directions():
    page = {"loss", "rewards/<function>/mean", "kl"}
    assert differences(page, {"loss", "eval_loss", "rewards/length/mean", "entropy"}) == ({"entropy"}, {"kl"})
