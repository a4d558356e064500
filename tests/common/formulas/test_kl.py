import math

import pytest
import torch

from trimtab_common.formulas.kl import (
    SAMPLED_KL,
    AdaptiveKLController,
    FixedKLController,
    full,
    k1,
    k3,
)


def bernoulli(p: float) -> torch.Tensor:
    return torch.tensor([p, 1 - p], dtype=torch.float64).log()


P, Q = bernoulli(0.7), bernoulli(0.4)
EXACT = 0.7 * math.log(0.7 / 0.4) + 0.3 * math.log(0.3 / 0.6)


def test_full_is_the_textbook_sum():
    assert full(P, Q).item() == pytest.approx(EXACT, rel=1e-12)


def test_full_counts_a_token_of_probability_zero_as_zero():
    # Of three tokens, the third is forbidden in both models: the KL covers the first two, in value and gradient.
    p, q = (torch.cat([x, torch.tensor([-torch.inf])]).requires_grad_() for x in (P, Q))
    pair_p, pair_q = P.clone().requires_grad_(), Q.clone().requires_grad_()
    full(p.log_softmax(-1), q.log_softmax(-1)).backward()
    full(pair_p.log_softmax(-1), pair_q.log_softmax(-1)).backward()
    assert full(p, q).item() == pytest.approx(EXACT, rel=1e-12)
    assert full(p, torch.cat([Q, torch.zeros(1)])).item() == pytest.approx(EXACT, rel=1e-12)
    for logits, pair in ((p, pair_p), (q, pair_q)):
        assert logits.grad[2] == 0
        torch.testing.assert_close(logits.grad[:2], pair.grad)


def test_full_is_infinite_where_the_reference_forbids_what_the_policy_does():
    assert full(P, torch.tensor([0.0, -torch.inf], dtype=torch.float64)).item() == math.inf


@pytest.mark.parametrize("estimator", [k1, k3])
def test_k1_and_k3_are_unbiased(estimator):
    assert (P.exp() * estimator(P, Q)).sum().item() == pytest.approx(EXACT, rel=1e-12)


@pytest.mark.parametrize(("name", "value"), [("kl", -0.5), ("abs", 0.5), ("mse", 0.125), ("k3", math.exp(0.5) - 1.5)])
def test_estimators_by_hand(name, value):
    # the reference gives the token e^0.5 times the probability
    assert SAMPLED_KL[name](torch.tensor(-1.5), torch.tensor(-1.0)).item() == pytest.approx(value, rel=1e-6)


def test_k3_stays_finite_where_the_policy_forbids_the_token():
    assert torch.isfinite(k3(torch.tensor(-1e4), torch.tensor(0.0)))


def test_adaptive_controller_moves_by_at_most_a_fifth_of_the_batch_over_the_horizon():
    kl = AdaptiveKLController(0.2, target=6, horizon=10_000)
    kl.update(60.0, 500)
    assert kl.value == pytest.approx(0.2 * (1 + 0.2 * 500 / 10_000))
    kl.update(6.6, 1000)  # 10% above the target
    assert kl.value == pytest.approx(0.202 * (1 + 0.1 * 0.1))
    kl.update(-3.0, 1000)
    assert kl.value == pytest.approx(0.20402 * (1 - 0.2 * 0.1))


def test_adaptive_controller_keeps_its_rule_over_several_horizons():
    kl = AdaptiveKLController(0.2, target=6, horizon=100)
    kl.update(0.0, 400)
    assert kl.value == pytest.approx(0.2 * (1 - 0.2 * 4))
    kl.update(60.0, 1000)
    assert kl.value == pytest.approx(0.04 * (1 + 0.2 * 10))


def test_adaptive_controller_divides_by_ten_at_most_and_stays_positive():
    for n_steps in (500, 1067, 10**9):  # the plain rule multiplies by 0, -1.134 and -2e6
        kl = AdaptiveKLController(0.2, target=6, horizon=100)
        kl.update(0.0, n_steps)
        assert kl.value == pytest.approx(0.02)


def test_an_assigned_coefficient_is_the_one_that_moves():
    kl = AdaptiveKLController(0.2, target=6, horizon=100)
    kl.value = 0.5
    kl.update(60.0, 100)
    assert kl.value == pytest.approx(0.5 * 1.2)


@pytest.mark.parametrize(
    "settings", [{"target": 0.0}, {"horizon": 0.0}, {"max_kl_coef": math.nan}, {"gain": -1.0}, {"gain": math.nan}]
)
def test_adaptive_controller_refuses_what_would_divide_by_zero_or_give_nan(settings):
    with pytest.raises(ValueError, match=f"AdaptiveKLController.*{next(iter(settings))}"):
        AdaptiveKLController(0.2, **{"target": 6.0, "horizon": 1e4} | settings)


def test_controllers_restore_their_coefficient():
    kl = AdaptiveKLController(0.2, target=6, horizon=100)
    kl.update(0.0, 50)
    other = AdaptiveKLController(1.0, target=6, horizon=100)
    other.load_state_dict(kl.state_dict())
    assert other.value == kl.value != 0.2


def test_a_bounded_coefficient_does_not_wind_up():
    bounded = AdaptiveKLController(0.2, target=6, horizon=100, max_kl_coef=0.3)
    unbounded = AdaptiveKLController(0.2, target=6, horizon=100)
    for kl in (bounded, unbounded):
        for _ in range(40):  # no penalty lowers this KL
            kl.update(60.0, 100)
    assert bounded.value == 0.3
    assert unbounded.value > 100
    bounded.update(0.0, 100)
    assert bounded.value == pytest.approx(0.3 * 0.8)


def test_damped_controller_answers_at_once_and_forgets():
    kl = AdaptiveKLController(0.2, target=6, horizon=1e12, gain=2.0)
    expected = {0.0: math.exp(-2), 3.0: math.exp(-1), 6.0: 1.0, 9.0: math.exp(1), 12.0: math.exp(2), 60.0: math.exp(2)}
    for current, factor in expected.items():
        kl.update(current, 100)
        assert kl.value == pytest.approx(0.2 * factor)


def test_damped_controller_is_bounded_as_a_whole():
    kl = AdaptiveKLController(0.2, target=6, horizon=100, max_kl_coef=0.3, gain=2.0)
    for _ in range(40):
        kl.update(60.0, 100)
        assert kl.value == 0.3
    kl.update(6.0, 100)
    assert kl.value == 0.3
    kl.update(0.0, 100)
    assert kl.value == pytest.approx(0.3 * 0.8 * math.exp(-2))


def test_damped_controller_goes_on_from_a_checkpoint_with_and_without_an_integral():
    kl, saved = AdaptiveKLController(0.2, target=6, horizon=100, gain=2.0), AdaptiveKLController(0.7, 6, 100)
    kl.load_state_dict(saved.state_dict())
    assert (kl.value, kl.integral) == (0.7, 0.7)
    kl.update(3.0, 100)
    other = AdaptiveKLController(0.2, target=6, horizon=100, gain=2.0)
    other.load_state_dict(kl.state_dict())
    kl.update(9.0, 100)
    other.update(9.0, 100)
    assert kl.value == other.value


def largest_error(kl: AdaptiveKLController) -> float:
    """Returns the largest |log(KL / target)| in the last 20 of 60 steps; the KL nears 0.3 / coefficient in 20 steps."""
    current, errors = 0.0, []
    for _ in range(60):
        current += (0.3 / kl.value - current) / 20
        kl.update(current, 32)
        errors.append(abs(math.log(current / kl.target)))
    return max(errors[40:])


@pytest.mark.parametrize("target", [3.0, 6.0, 12.0])
def test_damping_ends_the_swings_of_a_kl_that_follows_late(target: float):
    plain = largest_error(AdaptiveKLController(0.1, target, horizon=96))
    damped = largest_error(AdaptiveKLController(0.1, target, horizon=96, gain=2.0))
    assert damped < 0.05
    assert plain > 0.15


def test_damped_controller_restores_coefficient_and_integral():
    kl, other = (AdaptiveKLController(0.2, target=6, horizon=100, gain=2.0) for _ in range(2))
    kl.update(0.0, 50)
    other.load_state_dict(kl.state_dict())
    for one in (kl, other):
        one.update(7.0, 50)
    assert other.value == kl.value != 0.2


def test_fixed_controller_is_fixed():
    kl = FixedKLController(0.1)
    kl.update(1e9, 10**6)
    assert kl.value == 0.1


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "kl", [FixedKLController(0.1), AdaptiveKLController(0.1, 6, 100), AdaptiveKLController(0.1, 6, 100, gain=1)]
)
def test_no_controller_keeps_what_is_not_finite(kl, broken):
    before = kl.state_dict()
    for call in (
        lambda: kl.update(broken, 8),
        lambda: kl.update(6.0, broken),
        lambda: kl.load_state_dict({"value": broken}),
        lambda: kl.load_state_dict({"value": 0.1, "integral": broken}),
        lambda: FixedKLController(broken),
        lambda: AdaptiveKLController(0.1, target=broken, horizon=100),
    ):
        with pytest.raises(ValueError, match=f"KLController: .*{broken} came, and finite numbers are needed"):
            call()
    assert kl.state_dict() == before
