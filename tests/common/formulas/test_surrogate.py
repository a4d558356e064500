import math

import pytest
import torch

from trimtab_common.formulas.surrogate import clipped_surrogate, surrogate_stats

CLIP = {"clip_low": 0.2, "clip_high": 0.3}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [(1.1, 2.0, -2.2), (1.5, 2.0, -2.6), (0.5, 2.0, -1.0), (0.5, -2.0, 1.6), (1.5, -2.0, 3.0)],
)
def test_surrogate_by_hand(ratio, advantage, loss):
    log_ratio = torch.tensor(math.log(ratio), requires_grad=True)
    result = clipped_surrogate(log_ratio, torch.tensor(advantage), **CLIP)
    assert result.item() == pytest.approx(loss, rel=1e-6)
    result.backward()
    is_clipped = (ratio > 1.3 and advantage > 0) or (ratio < 0.8 and advantage < 0)
    assert log_ratio.grad.item() == pytest.approx(0.0 if is_clipped else -ratio * advantage, rel=1e-6)


def test_at_ratio_one_the_gradient_is_the_policy_gradient():
    log_ratio = torch.zeros(5, requires_grad=True)
    advantages = torch.randn(5)
    clipped_surrogate(log_ratio, advantages, **CLIP).sum().backward()
    torch.testing.assert_close(log_ratio.grad, -advantages)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (5.0, -2.0, 6.0, 0.0),
        (2.5, -2.0, 5.0, 5.0),
        (5.0, 2.0, -2.6, 0.0),
        (1.1, 2.0, -2.2, -2.2),
        (0.5, -2.0, 1.6, 0.0),
    ],
)
def test_a_dual_clip_bounds_what_a_bad_action_costs_and_nothing_else(ratio, advantage, loss, slope):
    log_ratio = torch.tensor(math.log(ratio), requires_grad=True)
    result = clipped_surrogate(log_ratio, torch.tensor(advantage), **CLIP, dual_clip=3.0)
    result.backward()
    assert (result.item(), log_ratio.grad.item()) == (pytest.approx(loss, rel=1e-6), pytest.approx(slope, rel=1e-6))


def test_statistics_count_what_the_mask_counts():
    log_ratio = torch.tensor([math.log(2.0), math.log(0.5), 0.0, 50.0])
    advantages, mask = torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([1, 1, 1, 0])
    stats = {name: mean.value for name, mean in surrogate_stats(log_ratio, advantages, mask, **CLIP).items()}
    assert stats["ratio"] == pytest.approx(3.5 / 3)
    assert stats["policykl"] == pytest.approx(0.0, abs=1e-7)
    assert stats["approxkl"] == pytest.approx(math.log(2.0) ** 2 / 3)
    assert stats["clipfrac"] == pytest.approx(1 / 3)
