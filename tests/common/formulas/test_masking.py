import pytest
import torch

from trimtab_common.formulas.masking import explained_variance, masked_mean, masked_var, rescale, whiten
from trimtab_common.stats import RunningMoments

X = torch.tensor([[1.0, 2.0, 300.0], [6.0, float("nan"), float("inf")]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


def test_mean_and_variance_are_of_the_masked_numbers_alone():
    assert masked_mean(X, MASK) == 3.0
    torch.testing.assert_close(masked_var(X, MASK), torch.tensor((4 + 1 + 9) / 3))


def test_whiten_gives_mean_zero_variance_one_and_zero_outside():
    white = whiten(X, MASK)
    torch.testing.assert_close(white[MASK.bool()], torch.tensor([-2.0, -1.0, 3.0]) / (14 / 3) ** 0.5)
    assert (white[~MASK.bool()] == 0).all()


def test_rescale_gives_variance_one_keeps_the_mean_and_zero_outside():
    scaled = rescale(X, MASK)
    torch.testing.assert_close(scaled[MASK.bool()], 3 + torch.tensor([-2.0, -1.0, 3.0]) / (14 / 3) ** 0.5)
    assert (scaled[~MASK.bool()] == 0).all()


def test_rescale_leaves_a_constant_as_it_is():
    assert rescale(torch.full((1, 3), 7.0), torch.ones(1, 3)).tolist() == [[7.0, 7.0, 7.0]]


def test_what_is_not_finite_is_not_hidden():
    x = torch.tensor([1.0, float("nan"), 3.0])
    assert whiten(x, torch.ones(3)).isnan().all()
    assert explained_variance(torch.ones(3), x, torch.ones(3)).isnan()


def test_a_single_number_whitens_to_zero_and_not_to_nan():
    assert whiten(torch.tensor([[5.0]]), torch.ones(1, 1)).item() == 0.0


@pytest.mark.parametrize(("value", "count"), [(1000.3, 4096), (100.3, 65536), (33.3, 1000), (0.1, 1000), (0.0, 7)])
def test_what_rounding_leaves_of_a_constant_is_no_deviation(value, count):
    x, mask = torch.full((count,), value), torch.ones(count)
    assert (whiten(x, mask) == 0).all()
    assert explained_variance(x + torch.randn(count), x, mask) == 0
    moments = RunningMoments()
    moments.update(x.double())
    assert moments.std == 1.0


def test_explained_variance_of_perfect_mean_and_opposite_predictions():
    returns, mask = torch.tensor([[1.0, 2.0, 3.0, 9.0]]), torch.tensor([[1, 1, 1, 0]])
    assert explained_variance(returns + 5, returns, mask) == 1
    assert explained_variance(torch.zeros(1, 4), returns, mask) == 0
    torch.testing.assert_close(explained_variance(-returns, returns, mask), torch.tensor(-3.0))
