"""The figures of tools/steps.py."""

import torch
from tools.steps import Trace, class_lines

from trimtab_common.stats import Deviation, Mean, Variance


def test_the_functions_of_the_packages_that_run_are_counted_once():
    trace = Trace()
    trace.start()
    for number in (1.0, 2.0):
        _ = (Mean(number, 1) + Mean(number, 1)).value
    trace.stop()
    Mean.of(torch.ones(2))
    assert {code.co_name for code in trace.codes} == {"__add__", "value"}
    assert str(trace) == "2 functions in 1 files"


def test_lines_of_a_class_are_those_of_its_own_bases_too():
    assert class_lines(Deviation) == class_lines(Variance) + 6
