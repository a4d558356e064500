"""What a step needs of an accelerator stands in budgets.json: a change that needs more, or much less, says so there."""

from types import ModuleType

import pytest
import torch
from tests.accelerator import budgets
from tests.accelerator.budgets import Need

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.usefixtures("device"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("name", budgets.NAMES)
def test_a_step_keeps_its_budget(name: str):
    if fault := budgets.judgement(name, budgets.measure(name), budgets.read()[name]):
        pytest.fail(fault, pytrace=False)


def test_the_table_has_a_line_for_each_row():
    assert budgets.TABLE.read_text() == budgets.text_of(budgets.read())


def test_what_ran_before_changes_nothing(device: ModuleType):
    before = budgets.measure("sft step")
    held = torch.zeros(100_000, device="musa")
    budgets.measure("reward step")
    assert budgets.measure("sft step") == before
    assert device.memory_allocated() >= held.nbytes


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, ""),
        ({"operators": 1030, "bytes": 10_300}, ""),
        ({"operators": 1031}, "operators: 1,031, which is more than the budget of 1,000"),
        ({"bytes": 10_301}, "bytes: 10,301, which is more than the budget of 10,000"),
        ({"waits": 11}, "waits: 11, which is more than the budget of 10"),
        ({"copies": 1}, "copies: 1, which is more than the budget of 0"),
        ({"operators": 900, "waits": 9, "bytes": 9000}, ""),
        ({"operators": 899}, "operators: 899, which is less than the budget of 1,000: the table is out of date"),
        ({"waits": 8}, "waits: 8, which is less than the budget of 10: the table is out of date"),
    ],
)
def test_what_a_budget_allows(change: dict[str, float], fault: str):
    budget: dict[str, float] = {"operators": 1000, "waits": 10, "copies": 0, "bytes": 10_000}
    said = budgets.judgement("a step", Need(budget | change, {"item": 7, "nonzero": 0}), budget)
    assert said.splitlines()[1:2] == [fault] * bool(fault)
    if fault:
        assert "reasons of the waits: item 7\n" in said
        assert budgets.line("a step", budget | change) in said
        assert said.endswith(budgets.RECORD)
