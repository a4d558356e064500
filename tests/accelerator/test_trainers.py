"""Every trainer of language models trains, evaluates, saves and resumes on an accelerator."""

from pathlib import Path

import pytest
import torch
from tests.accelerator.runs import Case, cases, train

pytestmark = [pytest.mark.accelerator, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("case", list(cases()), ids="-".join)
def test_two_steps_are_one_step_a_save_a_resume_and_another(case: Case, tmp_path: Path):
    straight = train(case, tmp_path / "straight", interrupt=False)
    resumed = train(case, tmp_path / "resumed", interrupt=True)
    assert all(value.isfinite().all() for value in straight.values())
    assert all(torch.equal(value, resumed[name]) for name, value in straight.items())
