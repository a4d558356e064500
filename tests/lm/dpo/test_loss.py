"""Compares DPO's losses with their papers: hand-worked values and gradients, optima, limits and invariances."""

import math
from dataclasses import fields, replace

import pytest
import torch

from trimtab_lm.dpo import loss as losses
from trimtab_lm.dpo.loss import (
    LOSSES,
    WITHOUT_REFERENCE,
    PairLogprobs,
    check_losses,
    implicit_rewards,
    mixed,
    sigmoid,
)

BETA = 0.5
LOG, EXP = math.log, math.exp
SMOOTHING = {"robust": 0.1, "exo_pair": 0.1}
COUPLED = {"kto_pair", "kto", "aot", "aot_pair"}


def pairs_of(a, b, *, lengths=(1, 1), dtype=torch.float64) -> PairLogprobs:
    """Returns pairs with log-ratios `a` and `b` relative to a reference that is not zero."""
    a, b = (torch.tensor(x, dtype=dtype).reshape(-1) for x in (a, b))
    ref_chosen, ref_rejected = torch.full_like(a, -8.0), torch.full_like(b, -4.0)
    lengths = [torch.full((len(a),), n) for n in lengths]
    return PairLogprobs(a + ref_chosen, b + ref_rejected, ref_chosen, ref_rejected, *lengths)


def random_pairs(n: int) -> PairLogprobs:
    generator = torch.Generator().manual_seed(0)
    logprobs = [-20 * torch.rand(n, generator=generator, dtype=torch.float64) for _ in range(4)]
    return PairLogprobs(*logprobs, *(torch.randint(1, 9, (n,), generator=generator) for _ in range(2)))


def taken(pairs: PairLogprobs, rows) -> PairLogprobs:
    return PairLogprobs(*(getattr(pairs, field.name)[rows] for field in fields(pairs) if field.init))


def gradients(name: str, pairs: PairLogprobs, **numbers) -> tuple[float, float]:
    pairs = replace(pairs, chosen=pairs.chosen.requires_grad_(), rejected=pairs.rejected.requires_grad_())
    LOSSES[name](pairs, **numbers).sum().backward()
    return pairs.chosen.grad.item(), 0.0 if pairs.rejected.grad is None else pairs.rejected.grad.item()


def odds(p: float) -> float:
    return p / (1 - p)


WRONG = odds(EXP(-4)) / odds(EXP(-8))  # the odds that orpo lowers
SLOPE = WRONG / (1 + WRONG)

# beta a = log 3, beta b = -log 2: s(beta a) = 3/4, s(beta b) = 1/3, beta m = log 6, s(beta m) = 6/7
WORKED = {
    "sigmoid": (0.0, LOG(7 / 6)),
    "sigmoid, a tenth of the labels wrong": (0.1, 0.9 * LOG(7 / 6) + 0.1 * LOG(7)),
    "hinge": (0.0, 0.0),
    "kto_pair": (0.0, (1 / 4 + 1 / 7) / 2),  # the KL terms are a and 0
    "kto": (0.0, (1 / 4 + 1 / 7) / 2),
    "robust": (0.1, (0.9 * LOG(7 / 6) - 0.1 * LOG(7)) / 0.8),
    "exo_pair": (0.1, 6 / 7 * LOG(6 / 7 / 0.9) + 1 / 7 * LOG(1 / 7 / 0.1)),
    "nca_pair": (0.0, LOG(4 / 3) + LOG(4) / 2 + LOG(3 / 2) / 2),
    "apo_zero": (0.0, 1 / 4 + 1 / 3),
    "apo_down": (0.0, 3 / 4 + 1 / 7),
    "sppo_hard": (0.0, (LOG(3) - 0.5) ** 2 / BETA**2 + (0.5 - LOG(2)) ** 2 / BETA**2),
    "ipo": (0.0, (LOG(6) / BETA - 1) ** 2),
    "aot": (0.1, 0.9 * LOG(7 / 6) + 0.1 * LOG(7)),
    "aot_pair": (0.1, 0.9 * LOG(7 / 6) + 0.1 * LOG(7)),
    "discopop": (0.0, LOG(7 / 6) / (6**20 + 1) + 1 / 6 / (1 + 6**-20)),
    "sft": (0.0, 8 - LOG(3) / BETA),
    # log pi(chosen) = 2 log 3 - 8 and log pi(rejected) = -2 log 2 - 4, of one token each
    "cpo": (0.0, LOG(1 + EXP(2) / 6) + 8 - LOG(3) / BETA),
    "simpo": (0.0, LOG(1 + EXP(2.5) / 6)),
    "orpo": (0.0, 8 - LOG(3) / BETA + BETA * LOG(1 + odds(EXP(-4) / 4) / odds(9 * EXP(-8)))),
}


@pytest.mark.parametrize("case", WORKED)
def test_a_pair_by_hand(case):
    label_smoothing, expected = WORKED[case]
    pairs = pairs_of(LOG(3) / BETA, -LOG(2) / BETA)
    loss = LOSSES[case.split(",")[0]](pairs, beta=BETA, label_smoothing=label_smoothing)
    assert loss.shape == (1,)
    assert loss.item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


# Value, and gradients for chosen and rejected divided by beta, where policy and reference agree.
AT_THE_REFERENCE = {
    "sigmoid": (LOG(2), -1 / 2, 1 / 2),
    "hinge": (1.0, -1.0, 1.0),
    "ipo": (1 / (4 * BETA**2), -1 / BETA**2, 1 / BETA**2),
    "kto_pair": (1 / 2, -1 / 8, 1 / 8),
    "robust": (LOG(2), -1 / 2 / 0.8, 1 / 2 / 0.8),  # steeper by 1 / (1 - 2e)
    "exo_pair": (-LOG(2) - LOG(0.09) / 2, -LOG(9) / 4, LOG(9) / 4),
    "nca_pair": (2 * LOG(2), -1 / 4, 1 / 4),
    "apo_zero": (1.0, -1 / 4, 1 / 4),
    "apo_down": (1.0, 0.0, 1 / 4),
    "sppo_hard": (1 / (2 * BETA**2), -1 / BETA**2, 1 / BETA**2),
    "aot": (LOG(2), -1 / 2, 1 / 2),
    "aot_pair": (LOG(2), -1 / 2, 1 / 2),
    "discopop": ((LOG(2) + 1) / 2, 5 * (1 - LOG(2)) - 3 / 4, 3 / 4 - 5 * (1 - LOG(2))),
    "sft": (8.0, -1 / BETA, 0.0),
    # log pi is -8 and -4
    "cpo": (8 + LOG(1 + EXP(2)), -1 / BETA - 1 / (1 + EXP(-2)), 1 / (1 + EXP(-2))),
    "simpo": (LOG(1 + EXP(2.5)), -1 / (1 + EXP(-2.5)), 1 / (1 + EXP(-2.5))),
    "orpo": (8 + BETA * LOG(1 + WRONG), -1 / BETA - SLOPE / (1 - EXP(-8)), SLOPE / (1 - EXP(-4))),
}


@pytest.mark.parametrize("name", AT_THE_REFERENCE)
def test_value_and_gradient_where_policy_and_reference_agree(name):
    value, by_chosen, by_rejected = AT_THE_REFERENCE[name]
    numbers = {"beta": BETA, "label_smoothing": SMOOTHING.get(name, 0.0)}
    assert LOSSES[name](pairs_of(0.0, 0.0), **numbers).item() == pytest.approx(value, rel=1e-12)
    slopes = [gradient / BETA for gradient in gradients(name, pairs_of(0.0, 0.0), **numbers)]
    assert slopes == pytest.approx([by_chosen, by_rejected], rel=1e-12, abs=1e-12)


def test_every_loss_has_a_hand_worked_value_and_gradient():
    assert set(WORKED) - {"sigmoid, a tenth of the labels wrong"} == set(LOSSES)
    assert set(AT_THE_REFERENCE) == set(LOSSES) - {"kto"}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_margins_of_ten_thousand_nats_are_finite_in_float32(name, dtype):
    extremes = [-1e4, 0.0, 1e4]
    a, b = [x for x in extremes for _ in extremes], extremes * 3
    pairs = pairs_of(a, b, dtype=dtype)
    pairs = replace(pairs, chosen=pairs.chosen.requires_grad_(), rejected=pairs.rejected.requires_grad_())
    for beta in (0.1, 1.0, 10.0):
        losses = LOSSES[name](pairs, beta=beta, label_smoothing=SMOOTHING.get(name, 0.0))
        losses.sum().backward()
        assert losses.dtype == torch.float32
        for tensor in (losses, pairs.chosen.grad, pairs.rejected.grad):
            assert tensor is None or torch.isfinite(tensor).all()  # sft does not read the rejected answer


def test_sft_is_the_loss_per_token_of_the_chosen_answer():
    assert LOSSES["sft"](pairs_of(2.0, 0.0, lengths=(3, 1)), beta=BETA).item() == 2.0  # log pi = -6, three tokens


def test_losses_without_a_reference_are_those_of_trl():
    """TRL 1.16.0: CPOTrainer.cpo_loss, also with simpo and gamma 0.5, and ORPOTrainer.odds_ratio_loss, of these rows;
    its trainers add the losses per token of the chosen answer, to CPO and less the odds ratio."""
    chosen, rejected = torch.tensor([-12.0, -30.5, -3.25, -80.0]), torch.tensor([-15.0, -21.25, -40.0, -79.0])
    lengths = torch.tensor([6, 10, 2, 40]), torch.tensor([5, 17, 8, 25])
    nothing = torch.zeros(4)
    pairs = PairLogprobs(chosen, rejected, nothing, nothing, *lengths)
    nll = -chosen / lengths[0]
    for label_smoothing, margins in (
        (0.0, [0.20141329, 4.1164370, 0.0019285933, 0.15016480]),
        (0.1, [0.35141327, 3.7064369, 0.62692863, 0.33216482]),
    ):
        simpo = LOSSES["simpo"](pairs, beta=2.0, label_smoothing=label_smoothing)
        assert simpo.tolist() == pytest.approx(margins, rel=1e-5)
    for label_smoothing, margins in (
        (0.0, [0.55435520, 1.2589916, 0.025033439, 0.74439669]),
        (0.1, [0.58435518, 1.1664915, 0.39253342, 0.73439664]),
    ):
        cpo = LOSSES["cpo"](pairs, beta=0.1, label_smoothing=label_smoothing)
        assert (cpo - nll).tolist() == pytest.approx(margins, rel=1e-5, abs=1e-6)
    ratios = [-0.028875081, -0.22057810, -0.0027290783, -0.024925552]
    assert (nll - LOSSES["orpo"](pairs, beta=0.1)).tolist() == pytest.approx(ratios, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", sorted(WITHOUT_REFERENCE))
def test_a_loss_without_a_reference_does_not_read_it(name):
    pairs = random_pairs(6)
    others = replace(pairs, ref_chosen=pairs.ref_chosen - 3, ref_rejected=pairs.ref_rejected + 2)
    torch.testing.assert_close(LOSSES[name](pairs, beta=BETA), LOSSES[name](others, beta=BETA), rtol=0, atol=0)


def test_the_gamma_of_simpo_is_the_margin_that_it_asks_for():
    pairs = pairs_of([0.0, 0.0], [0.0, 0.0], lengths=(2, 4))  # log pi per token: -4 and -1
    loss = mixed(["simpo", "hinge"], [1.0, 0.0], simpo_gamma=1.5)(pairs, beta=0.5)
    assert loss.tolist() == pytest.approx([LOG(1 + EXP(3))] * 2)


def test_log_ratios_are_not_rounded_to_the_models_precision():
    pairs = pairs_of(0.0, 0.0, dtype=torch.bfloat16)
    pairs = replace(pairs, chosen=pairs.chosen - 300, ref_chosen=pairs.ref_chosen - 1)  # -308 and -9
    assert pairs.margin.item() == -299.0  # bfloat16 has no odd numbers there


@pytest.mark.parametrize("name", sorted(set(LOSSES) - COUPLED))
def test_a_pair_alone_is_the_pair_in_a_batch(name):
    pairs, numbers = random_pairs(6), {"beta": 0.1, "label_smoothing": SMOOTHING.get(name, 0.0)}
    alone = torch.cat([LOSSES[name](taken(pairs, [i]), **numbers) for i in range(6)])
    torch.testing.assert_close(LOSSES[name](pairs, **numbers), alone)


@pytest.mark.parametrize("name", sorted(COUPLED))
def test_coupled_losses_depend_on_the_batch_but_not_on_its_order(name):
    pairs = random_pairs(6)
    whole = LOSSES[name](pairs, beta=0.1).mean()
    shuffled = LOSSES[name](taken(pairs, [3, 0, 5, 1, 4, 2]), beta=0.1).mean()
    torch.testing.assert_close(whole, shuffled)
    alone = torch.cat([LOSSES[name](taken(pairs, [i]), beta=0.1) for i in range(6)]).mean()
    assert abs(whole - alone) > 1e-3


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_the_label_flipped_is_the_margin_negated(label_smoothing):
    """With half the labels wrong, the order of answers has no effect; flipping them at e equals 1 - e."""
    pairs = random_pairs(5)
    flipped = PairLogprobs(
        pairs.rejected, pairs.chosen, pairs.ref_rejected, pairs.ref_chosen, pairs.rejected_length, pairs.chosen_length
    )
    half = sigmoid(pairs, beta=0.1, label_smoothing=0.5)
    torch.testing.assert_close(half, sigmoid(flipped, beta=0.1, label_smoothing=0.5))
    torch.testing.assert_close(
        sigmoid(flipped, beta=0.1, label_smoothing=label_smoothing),
        sigmoid(pairs, beta=0.1, label_smoothing=1 - label_smoothing),
    )
    difference = sigmoid(flipped, beta=0.1) - sigmoid(pairs, beta=0.1)
    torch.testing.assert_close(difference, 0.1 * pairs.margin)  # -log s(-x) + log s(x) = x

    noisy = [losses.robust(x, beta=0.1, label_smoothing=label_smoothing) for x in (pairs, flipped)]
    unbiased = (1 - label_smoothing) * noisy[0] + label_smoothing * noisy[1]
    torch.testing.assert_close(unbiased, sigmoid(pairs, beta=0.1))


@pytest.mark.parametrize("name", ["sigmoid", "robust", "kto_pair", "nca_pair", "apo_zero", "apo_down", "discopop"])
def test_a_vanishing_beta_leaves_the_value_of_the_reference(name):
    pairs, zero = random_pairs(4), pairs_of(0.0, 0.0)
    vanishing = LOSSES[name](pairs, beta=1e-12)
    torch.testing.assert_close(vanishing, LOSSES[name](zero, beta=1e-12).expand(4), rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("name", "a", "b", "value"),
    [
        ("sigmoid", LOG(9) / BETA - 3, -3.0, -0.9 * LOG(0.9) - 0.1 * LOG(0.1)),  # s(beta m) = 1 - e
        ("exo_pair", LOG(9) / BETA - 3, -3.0, 0.0),
        ("sppo_hard", 1.0, -1.0, 0.0),  # +- 1 / (2 beta)
        ("ipo", 4.0, 3.0, 0.0),  # 1 / (2 beta)
        ("hinge", 3.0, 1.0, 0.0),  # from margin 1 / beta on
    ],
)
def test_least_where_the_paper_says(name, a, b, value):
    numbers = {"beta": BETA, "label_smoothing": 0.1}
    assert LOSSES[name](pairs_of(a, b), **numbers).item() == pytest.approx(value, abs=1e-12)
    assert gradients(name, pairs_of(a, b), **numbers) == pytest.approx((0.0, 0.0), abs=1e-12)
    for nearby in (a - 0.1, a + 0.1):
        assert LOSSES[name](pairs_of(nearby, b), **numbers).item() >= value


def test_hinge_by_hand():
    assert losses.hinge(pairs_of([0.5, -1.0], [0.0, 1.0]), beta=BETA).tolist() == [0.75, 2.0]


def test_ipo_is_about_log_probs_per_token():
    numbers = {"beta": 0.1}
    short, long = pairs_of(6.0, 3.0, lengths=(2, 3)), pairs_of(60.0, 30.0, lengths=(20, 30))
    assert losses.ipo(short, **numbers).item() == pytest.approx((3 - 1 - 5) ** 2)
    torch.testing.assert_close(losses.ipo(short, **numbers), losses.ipo(long, **numbers))


def test_kto_measures_each_answer_against_the_others():
    pairs = pairs_of([1.0, 3.0], [-4.0, 8.0])  # KL estimates 2 of both
    s = [1 / (1 + math.exp(-BETA * x)) for x in (1.0 - 2, 3.0 - 2, 2 + 4.0, 2 - 8.0)]
    assert losses.kto_pair(pairs, beta=BETA).tolist() == pytest.approx([1 - (s[0] + s[2]) / 2, 1 - (s[1] + s[3]) / 2])
    below = pairs_of(-2.0, -6.0)  # a KL is never negative
    assert losses.kto_pair(below, beta=BETA).item() == pytest.approx(
        1 - (1 / (1 + math.e) + 1 / (1 + math.exp(-3))) / 2
    )


def test_no_gradient_flows_through_the_kl_of_kto():
    assert gradients("kto_pair", pairs_of(2.0, -50.0), beta=BETA)[0] == pytest.approx(
        -0.5 * BETA * math.exp(-1) / (1 + math.exp(-1)) ** 2, rel=1e-9
    )


def test_aot_compares_quantiles():
    """Policy margins 5, 1 and reference margins 2, 4: the smaller 1 meets 2, the larger 5 meets 4."""
    x = torch.tensor
    pairs = PairLogprobs(x([-1.0, -2.0]), x([-6.0, -3.0]), x([-3.0, -2.0]), x([-5.0, -6.0]), x([1, 1]), x([1, 1]))
    expected = torch.nn.functional.softplus(x([0.5, -0.5]))
    torch.testing.assert_close(losses.aot(pairs, beta=BETA), expected)
    # log-ratios of the chosen answers 2, 0, of the rejected -1, 3: 0 meets -1, and 2 meets 3
    torch.testing.assert_close(losses.aot_pair(pairs, beta=BETA), torch.nn.functional.softplus(x([-0.5, 0.5])))


def test_aot_of_unpaired_answers_needs_no_pairing():
    pairs, order = random_pairs(6), [3, 0, 5, 1, 4, 2]
    other = replace(pairs, rejected=pairs.rejected[order], ref_rejected=pairs.ref_rejected[order])
    torch.testing.assert_close(losses.aot_pair(other, beta=0.1), losses.aot_pair(pairs, beta=0.1))
    assert not torch.allclose(losses.aot(other, beta=0.1), losses.aot(pairs, beta=0.1))


def test_exo_without_smoothing_has_that_of_its_default():
    pairs = random_pairs(4)
    torch.testing.assert_close(
        losses.exo_pair(pairs, beta=0.1), losses.exo_pair(pairs, beta=0.1, label_smoothing=1e-3), rtol=0, atol=0
    )


def test_robust_without_noise_is_dpo():
    torch.testing.assert_close(losses.robust(random_pairs(4), beta=0.1), sigmoid(random_pairs(4), beta=0.1))


def test_implicit_rewards_and_the_free_reference():
    pairs = pairs_of(3.0, -1.0)
    assert [reward.item() for reward in implicit_rewards(pairs, beta=0.1)] == pytest.approx([0.3, -0.1])
    free = replace(pairs, ref_chosen=torch.zeros(1), ref_rejected=torch.zeros(1))
    assert [reward.item() for reward in implicit_rewards(free, beta=0.1)] == pytest.approx([-0.5, -0.5])
    assert free.margin.item() == pytest.approx(0.0)


def test_a_mix_is_a_weighted_sum():
    pairs = pairs_of([0.0, 4.0], [0.0, 0.0])
    mix = mixed(["hinge", "apo_zero"], [2.0, 0.5])(pairs, beta=BETA)
    assert mix.tolist() == pytest.approx([2.5, 0.5 / (1 + math.exp(2)) + 0.25])
    torch.testing.assert_close(mixed("sigmoid")(pairs, beta=BETA), sigmoid(pairs, beta=BETA))
    smoothed = mixed(["sigmoid", "aot_pair"])(pairs_of(2.0, 0.0), beta=BETA, label_smoothing=0.5)
    assert smoothed.item() == pytest.approx(LOG(1 + math.e) + LOG(1 + 1 / math.e))


@pytest.mark.parametrize("names", ["sigmoyd", ["sigmoid", "sigmoyd"], []])
def test_an_unknown_loss_lists_those_there_are(names):
    for call in (lambda: mixed(names), lambda: check_losses(names, beta=0.1, label_smoothing=0.0)):
        with pytest.raises(ValueError, match=r"choose from sigmoid, hinge, .*discopop"):
            call()


@pytest.mark.parametrize("weights", [[1.0], [1.0, -0.5], [1.0, float("nan")], [1.0, float("inf")]])
def test_weights_are_one_for_each_loss(weights):
    with pytest.raises(ValueError, match="one weight each"):
        mixed(["sigmoid", "ipo"], weights)


@pytest.mark.parametrize(
    ("names", "beta", "label_smoothing", "match"),
    [
        ("sigmoid", 0.0, 0.0, "positive beta"),
        ("sigmoid", float("nan"), 0.0, "positive beta"),
        ("sigmoid", 0.1, -0.1, "between 0 and 0.5"),
        ("exo_pair", 0.1, 0.6, "between 0 and 0.5"),
        (["sigmoid", "robust"], 0.1, 0.5, "less than 0.5"),
        (["ipo", "hinge"], 0.1, 0.1, "no meaning for ipo, hinge"),
    ],
)
def test_numbers_no_loss_is_defined_for(names, beta, label_smoothing, match):
    with pytest.raises(ValueError, match=match):
        check_losses(names, beta=beta, label_smoothing=label_smoothing)


@pytest.mark.parametrize(
    ("names", "label_smoothing"), [("sigmoid", 0.5), ("robust", 0.49), (["ipo", "aot"], 0.1), (list(LOSSES), 0.0)]
)
def test_numbers_they_are_defined_for(names, label_smoothing):
    check_losses(names, beta=0.1, label_smoothing=label_smoothing)


@pytest.mark.parametrize("name", LOSSES)
def test_smoothing_is_refused_exactly_where_it_would_do_nothing(name):
    pairs = pairs_of(3.0, 1.0)
    matters = bool((LOSSES[name](pairs, beta=0.1, label_smoothing=0.3) != LOSSES[name](pairs, beta=0.1)).any())
    try:
        check_losses(name, beta=0.1, label_smoothing=0.3)
        accepted = True
    except ValueError:
        accepted = False
    assert accepted == matters


def test_shapes_that_would_broadcast_are_refused():
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="tensors of one shape"):
        PairLogprobs(x, x, x[:, None], x, x, x)
