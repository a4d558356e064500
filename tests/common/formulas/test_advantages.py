import math

import pytest
import torch

from trimtab_common.formulas.advantages import (
    batch_scaled,
    group_centred,
    group_whitened,
    leave_one_out,
)

SCORES = torch.tensor([1.0, 5.0, 0.1, 3.0, 7.0, 0.1, 0.1])
GROUPS = torch.tensor([7, 7, 2, 7, 40, 2, 2])


def test_a_group_is_measured_against_its_own_mean():
    torch.testing.assert_close(group_centred(SCORES, GROUPS), torch.tensor([-2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]))


def test_whitening_divides_by_the_sample_deviation_and_equal_scores_give_zero():
    torch.testing.assert_close(group_whitened(SCORES, GROUPS), torch.tensor([-1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]))


def test_whitening_by_the_population_deviation_gives_a_group_variance_one():
    # Squared distances of 1, 5, 3 from the mean: 4, 4, 0; the deviation is sqrt(8 / 3).
    edge = 2 / (8 / 3) ** 0.5
    expected = torch.tensor([-edge, edge, 0.0, 0.0, 0.0, 0.0, 0.0])
    torch.testing.assert_close(group_whitened(SCORES, GROUPS, correction=0), expected)
    lone = torch.tensor([1.0, 3.0]), torch.tensor([0, 1])
    assert group_whitened(*lone, correction=0).tolist() == [0.0, 0.0]


def test_leaving_one_out_measures_against_the_others():
    torch.testing.assert_close(leave_one_out(SCORES, GROUPS), torch.tensor([-3.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0]))


def test_integer_scores_do_not_round():
    torch.testing.assert_close(group_centred(torch.tensor([0, 1]), torch.tensor([3, 3])), torch.tensor([-0.5, 0.5]))


def test_what_rounding_leaves_of_equal_scores_is_not_blown_up():
    scores = torch.full((7,), 0.7)
    assert group_centred(scores, torch.zeros(7)).abs().max() > 0
    assert (group_whitened(scores, torch.zeros(7)) == 0).all()


@pytest.mark.parametrize(
    ("scores", "other"), [([0.0, 1.0, 0.0, 1.0], -1e6), ([0.5001, 0.5002, 0.5003, 0.5004], -1000.0)]
)
def test_a_group_keeps_its_scale_beside_scores_of_another_size(scores, other):
    groups = torch.tensor([0] * 4 + [1] * 4)
    both = group_whitened(torch.tensor([*scores, other, 0.0, 0.0, 0.0]), groups)
    alone = group_whitened(torch.tensor(scores), groups[:4])
    assert alone.abs().min() > 0.3
    torch.testing.assert_close(both[:4], alone)


def test_batch_scaling_divides_by_the_deviation_of_all_scores():
    scores, groups = torch.tensor([0.0, 2.0, 10.0, 12.0]), torch.tensor([0, 0, 1, 1])
    std = (104 / 3) ** 0.5  # squared distances 36, 16, 16, 36 from the mean 6
    torch.testing.assert_close(batch_scaled(scores, groups), torch.tensor([-1.0, 1.0, -1.0, 1.0]) / std)
    population = batch_scaled(scores, groups, correction=0)
    torch.testing.assert_close(population, torch.tensor([-1.0, 1.0, -1.0, 1.0]) / (104 / 4) ** 0.5)
    torch.testing.assert_close(batch_scaled(1e6 * scores, groups), batch_scaled(scores, groups))


def test_batch_scaling_of_equal_scores_gives_zero():
    for scores in (torch.full((7,), 0.7), torch.tensor([3])):
        assert (batch_scaled(scores, torch.zeros(len(scores), dtype=torch.long)) == 0).all()


@pytest.mark.parametrize("advantages", [group_centred, group_whitened, batch_scaled])
def test_no_rows_and_missing_groups_are_refused_and_nan_is_not_hidden(advantages):
    with pytest.raises(ValueError, match=r"scores has the shape \[0\] and groups \[0\]: one score at least"):
        advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long))
    with pytest.raises(ValueError, match=r"scores has the shape \[7\] and groups \[6\]"):
        advantages(SCORES, GROUPS[1:])
    assert advantages(torch.tensor([math.nan, 1.0]), torch.tensor([0, 0])).isnan().all()
