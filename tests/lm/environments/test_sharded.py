"""Episodes end at other turns on other processes; where these share the weights, all go on until the last one ends."""

import pytest
import torch
from tests.processes import results_of_two


@pytest.mark.slow
def test_processes_that_share_the_weights_sample_as_often(tmp_path):
    first, second = results_of_two("tests.lm.environments.run_sharded", tmp_path)
    assert len(first["turns"]) == len(second["turns"])
    assert first["turns"] != second["turns"]
    assert first["weights"]
    assert all(torch.equal(weight, second["weights"][name]) for name, weight in first["weights"].items())
