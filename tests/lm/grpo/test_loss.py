"""Compares GRPO's formulas with their papers: hand-worked sums, splits that must not matter, exact KLs."""

import math

import pytest
import torch

from trimtab_common.formulas.kl import k3
from trimtab_common.formulas.surrogate import clipped_surrogate
from trimtab_lm.grpo.loss import (
    LOG_RATIOS,
    NORMALIZATIONS,
    Totals,
    advantages,
    cispo_losses,
    corrected_k3,
    sequence_log_ratio,
    token_log_ratio,
    token_weights,
)
from trimtab_lm.grpo.statistics import policy_stats

CLIP = {"clip_low": 0.2, "clip_high": 0.3}
LENGTHS = [3, 1, 4, 2, 2]  # tokens in each of five completions


def flat(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `sequence` and `tokens_per_sequence` for completions of these lengths."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)), torch.tensor(lengths)


# --- advantages -------------------------------------------------------------------------------------------------------

SCORES = torch.tensor([[1.0, 5.0, 3.0], [2.0, 2.0, 2.0]])


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("group", [[-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
        ("none", [[-2.0, 2.0, 0.0], [0.0, 0.0, 0.0]]),
        ("batch", [[-2 / 1.9**0.5, 2 / 1.9**0.5, 0.0], [0.0, 0.0, 0.0]]),  # squares 2.25, 6.25, 0.25, 3 x 0.25
        ("rloo", [[-3.0, 3.0, 0.0], [0.0, 0.0, 0.0]]),
        ("reinforce++", [[-1.5 / 1.9**0.5, 2.5 / 1.9**0.5, 0.5 / 1.9**0.5], [-0.5 / 1.9**0.5] * 3]),
        ("raw", [[1.0, 5.0, 3.0], [2.0, 2.0, 2.0]]),
    ],
)
def test_advantages_by_hand(scale, expected):
    torch.testing.assert_close(advantages(SCORES, scale=scale), torch.tensor(expected))


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("group", [[-1.0, 1.0, 0.0, 0.0], [0.0, 0.5**0.5, 0.0, -(0.5**0.5)]]),
        ("none", [[-2.0, 2.0, 0.0, 0.0], [0.0, 1.0, 0.0, -1.0]]),
        ("batch", [[-2 / 2.5**0.5, 2 / 2.5**0.5, 0.0, 0.0], [0.0, 1 / 2.5**0.5, 0.0, -1 / 2.5**0.5]]),
        ("rloo", [[-3.0, 3.0, 0.0, 0.0], [0.0, 2.0, 0.0, -2.0]]),
        ("reinforce++", [[-2 / 2.5**0.5, 2 / 2.5**0.5, 0.0, 0.0], [0.0, 1 / 2.5**0.5, 0.0, -1 / 2.5**0.5]]),
        ("raw", [[1.0, 5.0, 0.0, 3.0], [0.0, 4.0, 0.0, 2.0]]),
    ],
)
def test_a_masked_completion_counts_nowhere(scale, expected):
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 0, 1]])
    scores = torch.tensor([[1.0, 5.0, float("nan"), 3.0], [-900.0, 4.0, 900.0, 2.0]])
    torch.testing.assert_close(advantages(scores, scale=scale, mask=mask), torch.tensor(expected))


@pytest.mark.parametrize("scale", ["group", "none", "batch", "rloo", "reinforce++"])
@pytest.mark.parametrize("mask", [[[1, 0, 0], [0, 0, 0]], [[0, 0, 0], [0, 0, 0]]])
def test_nothing_to_compare_with_gives_zero(scale, mask):
    assert (advantages(SCORES, scale=scale, mask=torch.tensor(mask)) == 0).all()


@pytest.mark.parametrize("scale", ["group", "batch", "reinforce++"])
def test_rounding_of_equal_scores_is_not_blown_up(scale):
    assert (advantages(torch.full((2, 7), 0.7), scale=scale) == 0).all()


def test_advantages_of_integer_scores():
    result = advantages(torch.tensor([[0, 1]]), scale="none")
    assert result.tolist() == [[-0.5, 0.5]]


def test_a_baseline_changes_the_noise_of_the_gradient_and_not_its_direction():
    """Over all pairs of answers, a share p of them right, A d log pi(right) averages p (1 - p); less the group's mean,
    which has the score itself in it, (G - 1) / G of that."""
    right, probability = torch.tensor([1.0, 0.0]), torch.tensor([0.3, 0.7])
    answers = torch.cartesian_prod(torch.arange(2), torch.arange(2))
    weights = probability[answers].prod(dim=1)
    slopes = right - probability[0]  # d log pi(answer) / d logit of the right answer
    means = {
        scale: float((weights[:, None] * advantages(right[answers], scale=scale) * slopes[answers]).sum() / 2)
        for scale in ("raw", "none", "rloo")
    }
    assert means["raw"] == pytest.approx(0.3 * 0.7)
    assert means["none"] == pytest.approx(0.3 * 0.7 / 2)
    assert means["rloo"] == pytest.approx(0.3 * 0.7)


# --- ratios -----------------------------------------------------------------------------------------------------------


def test_the_sequence_ratio_is_the_geometric_mean_of_its_tokens():
    sequence, lengths = flat([2, 3])
    ratios = torch.tensor([2.0, 8.0, 1.0, 1.0, 8.0], dtype=torch.float64)
    computed = sequence_log_ratio(ratios.log() - 5, torch.full_like(ratios, -5), sequence, lengths).exp()
    torch.testing.assert_close(computed, torch.tensor([4.0, 4.0, 2.0, 2.0, 2.0], dtype=torch.float64))
    computed = token_log_ratio(ratios.log() - 5, torch.full_like(ratios, -5), sequence, lengths).exp()
    torch.testing.assert_close(computed, ratios)


def test_tokens_in_any_order_and_completions_without_tokens():
    old = torch.zeros(5, dtype=torch.float64)
    logprobs = torch.tensor([1.0, 3.0, 0.0, 2.0, 4.0], dtype=torch.float64)
    computed = sequence_log_ratio(logprobs, old, torch.tensor([2, 0, 2, 0, 2]), torch.tensor([2, 0, 3]))
    torch.testing.assert_close(computed, torch.tensor([5 / 3, 2.5, 5 / 3, 2.5, 5 / 3], dtype=torch.float64))


@pytest.mark.parametrize("level", LOG_RATIOS)
def test_a_completion_of_one_token_is_the_same_at_both_levels(level):
    logprobs, old = torch.randn(4), torch.randn(4)
    torch.testing.assert_close(LOG_RATIOS[level](logprobs, old, *flat([1] * 4)), logprobs - old)


@pytest.mark.parametrize("level", LOG_RATIOS)
def test_the_first_update_is_the_policy_gradient_at_either_level(level):
    """At ratio 1 the gradient of the grpo loss by a log-prob is -A / (tokens of its completion x completions)."""
    sequence, lengths = flat(LENGTHS)
    old = torch.randn(12, dtype=torch.float64)
    logprobs, values = old.clone().requires_grad_(), torch.randn(5, dtype=torch.float64)
    log_ratio = LOG_RATIOS[level](logprobs, old, sequence, lengths)
    weights = token_weights("grpo", sequence, lengths, totals=Totals(5, 12, 12), max_completion_length=9)
    (clipped_surrogate(log_ratio, values[sequence], **CLIP) * weights).sum().backward()
    torch.testing.assert_close(logprobs.grad, (-values / (5 * lengths))[sequence], rtol=1e-6, atol=0)


def test_gspo_is_a_mean_over_completions_of_their_clipped_ratios():
    sequence, lengths = flat([2, 4])
    log_ratio = torch.tensor([0.1, 0.3, 0.9, -0.1, 0.5, 0.3], dtype=torch.float64, requires_grad=True)
    ratios = sequence_log_ratio(log_ratio, torch.zeros(6), sequence, lengths)
    weights = token_weights("grpo", sequence, lengths, totals=Totals(2, 6, 6), max_completion_length=9)
    losses = clipped_surrogate(ratios, torch.tensor([2.0, 1.0])[sequence], **CLIP)
    loss = (losses * weights).sum()
    assert loss.item() == pytest.approx((-2 * math.exp(0.2) - 1.3) / 2)  # the second, exp(0.4), is clipped
    loss.backward()
    expected = [-2 * math.exp(0.2) / 4] * 2 + [0.0] * 4
    assert log_ratio.grad.tolist() == pytest.approx(expected)


def test_cispo_weighs_the_gradient_of_log_pi_by_the_bounded_ratio():
    logprobs = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    ratios, values = torch.tensor([0.1, 1.2, 9.0], dtype=torch.float64), torch.tensor([1.0, -1.0, 2.0])
    losses = cispo_losses(ratios.log() + logprobs - logprobs.detach(), values, logprobs, clip_high=0.5)
    assert losses.tolist() == pytest.approx([0.1, -2.4, 9.0])
    losses.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-0.1, 1.2, -3.0])  # PPO's clip would give the last one 0


def test_cispo_is_that_of_trl():
    """TRL 1.16.0, GRPOTrainer._compute_loss of these rows with loss_type="cispo" and epsilon_high=4, which is our 3."""
    logprobs = torch.tensor([-1.0, -0.25, -2.0, -0.5, -3.0], requires_grad=True)
    old, sequence = torch.tensor([-1.5, -2.25, -1.5, -2.5, -1.0]), torch.tensor([0, 0, 0, 1, 1])
    lengths, values = torch.tensor([3, 2]), torch.tensor([1.5, -0.5])
    log_ratio = token_log_ratio(logprobs, old, sequence, lengths)
    losses = cispo_losses(log_ratio, values[sequence], logprobs, clip_high=3)
    weights = token_weights("cispo", sequence, lengths, totals=Totals(2, 5, 5), max_completion_length=9)
    loss = (weights * losses).sum()
    loss.backward()
    assert loss.item() == pytest.approx(0.9179342, rel=1e-5)
    expected = [-0.4946164, -1.2, -0.1819592, 0.4, 0.01353353]
    assert logprobs.grad.tolist() == pytest.approx(expected, rel=1e-5)


def test_wild_ratios_stay_finite():
    logprobs = torch.tensor([0.0, -500.0], requires_grad=True)
    old, signs = torch.tensor([-500.0, 0.0]), torch.tensor([-1.0, 1.0])
    for level in LOG_RATIOS:
        log_ratio = LOG_RATIOS[level](logprobs, old, *flat([1, 1]))
        losses = clipped_surrogate(log_ratio, signs, **CLIP, dual_clip=4.0)
        (losses + corrected_k3(logprobs, old, old)).sum().backward()
        torch.testing.assert_close(losses, torch.tensor([4.0, 0.0]), atol=1e-6, rtol=0)
        assert torch.isfinite(logprobs.grad).all()


# --- the penalty ------------------------------------------------------------------------------------------------------


def distributions() -> tuple[torch.Tensor, ...]:
    """Returns log-probs of policy (with logits that need a gradient), old policy and reference over six tokens."""
    logits = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    policy = logits[0].clone().requires_grad_()
    return policy, policy.log_softmax(0), logits[1].log_softmax(0), logits[2].log_softmax(0)


def test_the_corrected_penalty_is_the_kl_and_its_gradient_in_expectation_over_the_old_policy():
    logits, log_p, log_old, log_ref = distributions()
    kl = (log_p.exp() * (log_p - log_ref)).sum()
    expected = torch.autograd.grad(kl, logits, retain_graph=True)[0]
    estimate = (log_old.exp() * corrected_k3(log_p, log_old, log_ref)).sum()
    torch.testing.assert_close(estimate, kl)
    torch.testing.assert_close(torch.autograd.grad(estimate, logits)[0], expected)


def test_the_plain_penalty_has_the_gradient_of_the_other_kl():
    logits, log_p, _, log_ref = distributions()
    estimate = (log_p.detach().exp() * k3(log_p, log_ref)).sum()
    reverse = (log_ref.exp() * (log_ref - log_p)).sum()
    gradient = torch.autograd.grad(estimate, logits, retain_graph=True)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(reverse, logits)[0])


# --- normalisation ----------------------------------------------------------------------------------------------------

LOSSES = torch.tensor([1.0, 2.0, 6.0, 10.0, 1.0, 1.0, 1.0, 5.0, 4.0, 2.0, 7.0, 8.0])
BY_HAND = {
    "grpo": (3 + 10 + 2 + 3 + 7.5) / 5,
    "dapo": 48 / 12,
    "cispo": 48 / 12,
    "bnpo": 48 / 12,
    "dr_grpo": 48 / (5 * 9),
}


def summed(loss_type: str, ranks: list[list[int]]) -> float:
    """Returns the step's loss if each rank's micro-batches have these numbers of completions."""
    total, first = 0.0, 0
    losses, lengths = list(LOSSES.split(LENGTHS)), list(LENGTHS)
    for micro_batches in ranks:
        count = sum(lengths[first : first + sum(micro_batches)])
        totals = Totals(sequences=len(lengths), tokens=sum(lengths), rank_tokens=count, ranks=len(ranks))
        for size in micro_batches:
            rows = slice(first, first + size)
            weights = token_weights(loss_type, *flat(lengths[rows]), totals=totals, max_completion_length=9)
            total += (weights * torch.cat(losses[rows])).sum().item()
            first += size
    return total


@pytest.mark.parametrize("loss_type", NORMALIZATIONS)
@pytest.mark.parametrize("micro_batches", [[5], [1, 4], [2, 2, 1], [1] * 5])
def test_any_split_into_micro_batches_sums_to_the_loss_worked_by_hand(loss_type, micro_batches):
    assert summed(loss_type, [micro_batches]) == pytest.approx(BY_HAND[loss_type], rel=1e-6)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo"])
@pytest.mark.parametrize("ranks", [[[2], [3]], [[1, 1], [1, 2]], [[4], [1]], [[1, 1, 1, 1, 1], []]])
def test_several_processes_are_one(loss_type, ranks):
    assert summed(loss_type, ranks) == pytest.approx(BY_HAND[loss_type], rel=1e-6)


@pytest.mark.parametrize("ranks", [[[2], [3]], [[1, 1], [1, 2]]])
def test_bnpo_is_the_mean_of_each_processs_own_mean(ranks):
    assert summed("bnpo", ranks) == pytest.approx((19 / 4 + 29 / 8) / 2, rel=1e-6)


def test_masking_a_completion_is_leaving_it_out():
    """The second of three completions has no tokens, and does not enter the step's counts."""
    losses = torch.tensor([1.0, 3.0, 5.0])
    totals = Totals(sequences=2, tokens=3, rank_tokens=3)
    for loss_type, expected in {"grpo": 3.5, "dapo": 3.0, "bnpo": 3.0, "dr_grpo": 9 / 8}.items():
        weights = token_weights(loss_type, *flat([2, 0, 1]), totals=totals, max_completion_length=4)
        assert (weights * losses).sum().item() == pytest.approx(expected)


@pytest.mark.parametrize("loss_type", NORMALIZATIONS)
def test_a_step_where_all_is_masked_has_no_loss(loss_type):
    weights = token_weights(loss_type, *flat([0, 0]), totals=Totals(0, 0, 0), max_completion_length=4)
    assert weights.shape == (0,)


# --- statistics -------------------------------------------------------------------------------------------------------


def test_what_is_clipped_is_what_gets_no_gradient():
    ratio = torch.tensor([0.5, 0.5, 0.9, 1.25, 1.5, 1.5, 6.0, 6.0, 0.5])
    values = torch.tensor([-1.0, 1.0, -1.0, 1.0, 1.0, -1.0, -1.0, 1.0, 0.0])
    log_ratio = ratio.log().requires_grad_()
    kl = torch.arange(9.0)
    stats = policy_stats(log_ratio, values, **CLIP, dual_clip=4.0, kl=kl)
    shares = {name: mean.value for name, mean in stats.items()}
    assert shares["clip_ratio/low_mean"] == pytest.approx(1 / 9)
    assert shares["clip_ratio/high_mean"] == pytest.approx(2 / 9)
    assert shares["clip_ratio/region_mean"] == pytest.approx(3 / 9)
    assert shares["clip_ratio/dual_mean"] == pytest.approx(1 / 9)
    assert shares["ratio"] == pytest.approx(18.65 / 9)
    assert shares["approxkl"] == pytest.approx((log_ratio**2).mean().item() / 2)
    assert shares["kl"] == pytest.approx(4.0)
    clipped_surrogate(log_ratio, values, **CLIP, dual_clip=4.0).sum().backward()
    assert (log_ratio.grad == 0).sum() == 5  # the four clipped ones, and the one without advantage


def test_statistics_name_only_what_there_is():
    assert not {"kl", "clip_ratio/dual_mean"} & policy_stats(torch.zeros(1), torch.ones(1), **CLIP).keys()
