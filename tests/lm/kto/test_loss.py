"""Compares KTO's losses with the paper: hand-worked values and gradients, limits, and TRL's numbers."""

import math

import pytest
import torch

from trimtab_lm.kto.loss import LOSSES, WITHOUT_KL, apo_zero_unpaired_loss, kto_loss

D = torch.float64
LABELS = torch.tensor([True, False])
BETA = 0.5


def of(ratios: list[float], kl: float = 0.0, labels: torch.Tensor = LABELS, name: str = "kto", **numbers: float):
    return LOSSES[name](torch.tensor(ratios, dtype=D), labels, torch.tensor(kl, dtype=D), **{"beta": BETA, **numbers})


def test_answers_by_hand():
    """beta (r - z0) = log 3 of the desirable answer and -log 2 of the other: s(log 3) = 3/4, s(log 2) = 2/3."""
    kl = 0.7
    ratios = [kl + math.log(3) / BETA, kl - math.log(2) / BETA]
    assert of(ratios, kl).tolist() == pytest.approx([1 / 4, 1 / 3], rel=1e-12)
    weighted = of(ratios, kl, desirable_weight=4 / 3, undesirable_weight=2.0)
    assert weighted.tolist() == pytest.approx([1 / 3, 2 / 3], rel=1e-12)


def test_apo_zero_by_hand():
    ratios = [math.log(3) / BETA, -math.log(2) / BETA]
    assert of(ratios, 5.0, name="apo_zero_unpaired").tolist() == pytest.approx([1 / 4, 1 / 3], rel=1e-12)


@pytest.mark.parametrize("kl", [0.0, 2.5])
def test_half_of_the_weights_at_the_reference_point(kl: float):
    losses = of([kl, kl], kl, desirable_weight=1.5, undesirable_weight=0.5)
    assert losses.tolist() == pytest.approx([0.75, 0.25], rel=1e-12)


def test_the_gradient_is_steepest_at_the_reference_point_and_opposite_for_the_labels():
    """d/dr of lambda s(-beta (r - z0)) is -lambda beta / 4 where r = z0."""
    ratios = torch.full((2,), 1.5, dtype=D, requires_grad=True)
    kto_loss(ratios, LABELS, torch.tensor(1.5, dtype=D), beta=BETA, undesirable_weight=3.0).sum().backward()
    assert ratios.grad is not None
    assert ratios.grad.tolist() == pytest.approx([-BETA / 4, 3 * BETA / 4], rel=1e-12)


def test_the_other_label_is_the_rest_of_the_weight():
    ratios = [1.0, -2.0]
    both = of(ratios, 0.3) + of(ratios, 0.3, labels=~LABELS)
    assert both.tolist() == pytest.approx([1.0, 1.0], rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_ratios_of_ten_thousand_nats_stay_finite(name: str):
    ratios = torch.tensor([-1e4, 1e4], requires_grad=True)
    losses = LOSSES[name](ratios, LABELS, torch.tensor(3.0), beta=1.0)
    losses.sum().backward()
    assert ratios.grad is not None
    assert losses.tolist() == [1.0, 1.0]
    assert ratios.grad.isfinite().all()


def test_the_losses_of_trl():
    """TRL 1.16.0: KTOTrainer._compute_loss of a model that gives these log-probabilities; means over the answers."""
    logps = torch.tensor([-12.0, -30.5, -3.25, -80.0, -21.0])
    ratios = logps - torch.tensor([-15.0, -21.25, -8.0, -79.0, -21.5])
    others = torch.tensor([-40.0, -33.5, -52.25, -61.0, -18.0])
    kl = (others - torch.tensor([-44.0, -32.25, -57.0, -60.5, -22.0])).mean()
    labels = torch.tensor([True, False, True, False, True])
    assert float(kl) == pytest.approx(2.2)
    for beta, desirable, undesirable, expected in (
        (0.1, 1.0, 1.0, 0.42421621),
        (0.5, 1.0, 1.5, 0.31542671),
        (0.1, 1.33, 1.0, 0.52051038),
    ):
        weights = {"desirable_weight": desirable, "undesirable_weight": undesirable}
        losses = kto_loss(ratios, labels, kl, beta=beta, **weights)
        assert float(losses.mean()) == pytest.approx(expected, rel=1e-6)
    for undesirable, expected in ((1.0, 0.41109094), (1.25, 0.44903892)):
        losses = apo_zero_unpaired_loss(ratios, labels, kl, beta=0.1, undesirable_weight=undesirable)
        assert float(losses.mean()) == pytest.approx(expected, rel=1e-6)


def test_the_table_of_losses_without_an_estimate():
    for name in LOSSES:
        reads = not torch.equal(of([1.0, 1.0], 0.0, name=name), of([1.0, 1.0], 2.0, name=name))
        assert reads is (name not in WITHOUT_KL)
