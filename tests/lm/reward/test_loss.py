"""Compares the reward model's loss and measures with hand-worked numbers."""

import math

import pytest
import torch

from trimtab_lm.reward.loss import accuracy, calibration, centering, pair_loss, pair_margin

CHOSEN, REJECTED = torch.tensor([1.0, 0.0, -1.0]), torch.tensor([1.0, -math.log(3), 0.5])


def test_pair_loss_by_hand():
    expected = [math.log(2), math.log(4 / 3), math.log(1 + math.exp(1.5))]
    assert pair_loss(CHOSEN, REJECTED).tolist() == pytest.approx(expected)


def test_the_gradient_is_the_probability_of_being_wrong():
    chosen, rejected = CHOSEN.clone().requires_grad_(), REJECTED.clone().requires_grad_()
    pair_loss(chosen, rejected).sum().backward()
    wrong = torch.tensor([1 / 2, 1 / 4, 1 / (1 + math.exp(-1.5))])
    torch.testing.assert_close(chosen.grad, -wrong)
    torch.testing.assert_close(rejected.grad, wrong)


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_every_pair_meets_its_own_margin_alone(shape):
    margin = torch.tensor([0.0, math.log(3), 2.0])
    losses = pair_loss(CHOSEN, REJECTED, margin=margin.reshape(shape))
    assert losses.tolist() == pytest.approx([math.log(2), math.log(2), math.log(1 + math.exp(3.5))])


@pytest.mark.parametrize("margin", [2, 2.0, torch.tensor(2.0), [2.0, 2, 2.0], torch.tensor([2, 2, 2])])
def test_a_margin_of_any_sensible_kind(margin):
    torch.testing.assert_close(pair_loss(CHOSEN, REJECTED, margin=margin), pair_loss(CHOSEN - 2, REJECTED))


@pytest.mark.parametrize("shape", [(1,), (2,), (1, 3), (3, 3), (3, 1, 1), (1, 1)])
def test_a_margin_that_would_broadcast_is_refused(shape):
    with pytest.raises(ValueError, match=r"margin of 3 pairs has shape .* \[3\] or \[3, 1\]"):
        pair_margin(torch.zeros(shape), CHOSEN)


@pytest.mark.parametrize("function", [pair_loss, centering, accuracy, calibration])
@pytest.mark.parametrize(("chosen", "rejected"), [((3,), (3, 1)), ((3, 1), (3, 1)), ((3,), (1,)), ((), ())])
def test_scores_that_would_broadcast_are_refused(function, chosen, rejected):
    with pytest.raises(ValueError, match="need one shape"):
        function(torch.zeros(chosen), torch.zeros(rejected))


def test_extreme_scores_are_finite_and_half_precision_is_raised():
    chosen = torch.tensor([1e4, -1e4], dtype=torch.bfloat16, requires_grad=True)
    losses = pair_loss(chosen, -chosen.detach())
    losses.sum().backward()
    assert losses.dtype == torch.float32
    assert losses.tolist() == [0.0, pytest.approx(2e4, rel=1e-2)]
    assert torch.isfinite(chosen.grad).all()
    close = torch.tensor([256.0], dtype=torch.bfloat16), torch.tensor([-1.0], dtype=torch.bfloat16)
    assert centering(*close).item() == 255.0**2  # bfloat16 does not have this number


def test_the_difference_alone_counts_but_for_centering():
    torch.testing.assert_close(pair_loss(CHOSEN + 7, REJECTED + 7), pair_loss(CHOSEN, REJECTED))
    assert centering(CHOSEN, REJECTED).tolist() == pytest.approx([4.0, math.log(3) ** 2, 0.25])
    assert centering(torch.tensor([5.0]), torch.tensor([-5.0])).item() == 0.0


def test_a_tie_is_not_a_win():
    assert accuracy(CHOSEN, REJECTED).tolist() == [0.0, 1.0, 0.0]


def outcomes(right: int, wrong: int, odds: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns pairs of confidence odds / (1 + odds), of which `right` are right and `wrong` are wrong."""
    signs = torch.tensor([1.0] * right + [-1.0] * wrong)
    return signs * math.log(odds), torch.zeros(right + wrong)


@pytest.mark.parametrize(("right", "error"), [(8, 0.0), (10, 0.2), (5, 0.3), (0, 0.8)])
def test_calibration_within_a_bin(right, error):
    """Confidence 0.8 is perfectly calibrated if 8 of 10 are right."""
    assert calibration(*outcomes(right, 10 - right, odds=4.0)).item() == pytest.approx(error, abs=1e-6)


def test_calibration_weighs_bins_by_their_pairs_and_errors_do_not_cancel_between_them():
    sure, unsure = outcomes(6, 4, odds=9.0), outcomes(25, 5, odds=1.5)  # 0.6 for 0.9, and 25/30 for 0.6
    together = [torch.cat(x) for x in zip(sure, unsure, strict=True)]
    assert calibration(*together).item() == pytest.approx(0.25 * 0.3 + 0.75 * (25 / 30 - 0.6), rel=1e-5)
    assert calibration(*together, bins=1).item() == pytest.approx(0.75 * (25 / 30 - 0.6) - 0.25 * 0.3, rel=1e-5)


def test_ties_and_certainty_are_calibrated():
    scores = torch.tensor([0.0, 1e4, -3.0]), torch.tensor([0.0, -1e4, -3.0])
    assert calibration(*scores).item() == 0.0
    assert calibration(scores[1], scores[0]).item() == pytest.approx(1 / 3)
    assert math.isnan(calibration(scores[0][:0], scores[1][:0]).item())
