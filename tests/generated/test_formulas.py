"""Every formula equals a slow, plain computation on generated numbers, and never returns NaN."""

import math
from types import SimpleNamespace
from typing import Any, cast

import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab_common.formulas.advantages import batch_scaled, group_centred, group_whitened
from trimtab_common.formulas.kl import AdaptiveKLController, absolute, full, k1, k2, k3
from trimtab_common.formulas.masking import explained_variance, masked_mean, masked_var, rescale, whiten
from trimtab_common.formulas.surrogate import clipped_surrogate, surrogate_stats
from trimtab_common.stats import Deviation, Mean, RunningMoments, Surprise, Variance, merge_stats
from trimtab_diffusion.ddpo.loss import rwr_weights, sparse_weights
from trimtab_diffusion.prompt_stats import PerPromptStatTracker
from trimtab_lm.dpo.loss import LOSSES, PairLogprobs
from trimtab_lm.grpo.loss import (
    NORMALIZATIONS,
    SCALES,
    Totals,
    advantages,
    corrected_k3,
    token_weights,
)
from trimtab_lm.ppo import PPOConfig, PPOTrainer
from trimtab_lm.ppo.loss import clipped_value_loss, gae, per_token_rewards, policy_log_ratio
from trimtab_lm.reward.loss import accuracy, calibration, centering, pair_loss
from trimtab_lm.sampling.mismatch import mismatch_stats

from .inputs import DOUBLE, close, is_finite, logprob, reasonable, table, vectors

share = st.floats(0, 1, allow_nan=False)
clip = st.floats(0.01, 0.9)


def at_mask(x, mask):
    return [float(value) for value, counts in zip(x.flatten(), mask.flatten(), strict=True) if counts]


def mean(values):
    return math.fsum(values) / len(values)


def variance(values):
    return mean([(value - mean(values)) ** 2 for value in values])


@given(vectors(2, numbers=logprob))
def test_estimators_of_the_kl(pair):
    p, q = pair
    gaps = [float(a - b) for a, b in zip(p, q, strict=True)]
    close(k1(p, q), torch.tensor(gaps, dtype=DOUBLE))
    close(absolute(p, q), torch.tensor([abs(gap) for gap in gaps], dtype=DOUBLE))
    close(k2(p, q), torch.tensor([gap**2 / 2 for gap in gaps], dtype=DOUBLE))
    clamped = [max(-20.0, min(20.0, -gap)) for gap in gaps]
    close(k3(p, q), torch.tensor([math.expm1(gap) - gap for gap in clamped], dtype=DOUBLE))
    assert bool((k3(p, q) >= 0).all())
    assert is_finite(corrected_k3(p, q, q))


@given(vectors(2, least=2))
def test_the_full_kl_is_the_sum_over_the_vocabulary(logits):
    p, q = (column.log_softmax(0) for column in logits)
    plain = sum(math.exp(float(a)) * (float(a) - float(b)) for a, b in zip(p, q, strict=True))
    close(full(p, q), plain, abs_=1e-9)
    assert float(full(p, q)) > -1e-9


@given(vectors(2), clip, clip)
def test_the_clipped_surrogate(columns, low, high):
    log_ratio, gains = columns[0] / 10, columns[1]
    plain = []
    for log, gain in zip(log_ratio.tolist(), gains.tolist(), strict=True):
        ratio = math.exp(log)
        plain.append(-min(ratio * gain, max(1 - low, min(1 + high, ratio)) * gain))
    close(clipped_surrogate(log_ratio, gains, clip_low=low, clip_high=high), torch.tensor(plain, dtype=DOUBLE))
    stats = surrogate_stats(log_ratio, gains, torch.ones_like(gains), clip_low=low, clip_high=high)
    assert 0 <= stats["clipfrac"].value <= 1
    assert all(is_finite(value.value) for value in stats.values())


@given(table(columns=2), share, share)
def test_advantages_are_sums_of_discounted_errors(columns, gamma, lam):
    rewards, values, mask = columns
    result = gae(rewards, values, mask=mask, gamma=gamma, lam=lam)
    assert bool((result[mask == 0] == 0).all())
    for row in range(len(rewards)):
        steps = [t for t in range(rewards.shape[1]) if mask[row, t]]
        following = [*[float(values[row, t]) for t in steps[1:]], 0.0]
        errors = [
            float(rewards[row, t]) + gamma * v - float(values[row, t]) for t, v in zip(steps, following, strict=True)
        ]
        for k, t in enumerate(steps):
            plain = sum((gamma * lam) ** (j - k) * errors[j] for j in range(k, len(steps)))
            close(result[row, t], plain, abs_=1e-6)


@given(table(), st.floats(0, 10), st.data())
def test_rewards_per_token_add_up_to_the_score_less_the_penalty(columns, kl_coef, data):
    kl, mask = columns
    scores = torch.tensor(data.draw(st.lists(reasonable, min_size=len(kl), max_size=len(kl))), dtype=DOUBLE)
    rewards, rest = per_token_rewards(scores, kl, mask, kl_coef=kl_coef)
    close(rewards.sum(1), scores - kl_coef * (kl * mask).sum(1), abs_=1e-5)
    assert bool((rewards[mask == 0] == 0).all())
    assert ((rewards != rest).sum(1) <= 1).all()


@given(table())
def test_masked_statistics(columns):
    x, mask = columns
    inside = at_mask(x, mask)
    spoilt = torch.where(mask.bool(), x, torch.nan)
    close(masked_mean(spoilt, mask), mean(inside), abs_=1e-6)
    close(masked_var(x, mask), variance(inside), abs_=1e-6)
    white = whiten(spoilt, mask)
    close(white, torch.where(mask.bool(), (x - mean(inside)) / math.sqrt(variance(inside) + 1e-8), 0.0), abs_=1e-4)
    close(rescale(spoilt, mask), torch.where(mask.bool(), white + mean(inside), 0.0), abs_=1e-6)


@given(table(columns=2))
def test_explained_variance_is_at_most_one(columns):
    values, returns, mask = columns
    result = float(explained_variance(values, returns, mask))
    assert result <= 1 + 1e-9
    spread, error = variance(at_mask(returns, mask)), variance(at_mask(returns - values, mask))
    if spread > 1e-9:
        close(result, 1 - error / spread, abs_=1e-4)


@given(vectors(1, least=2, most=12), st.data())
def test_advantages_against_a_group(column, data):
    (scores,) = column
    groups = torch.tensor(data.draw(st.lists(st.integers(-2, 3), min_size=len(scores), max_size=len(scores))))
    for kind in (group_centred, group_whitened, batch_scaled):
        assert is_finite(kind(scores * 1e6, groups))
    for i in range(len(scores)):
        mine = [float(score) for score, group in zip(scores, groups, strict=True) if group == groups[i]]
        close(group_centred(scores, groups)[i], float(scores[i]) - mean(mine), abs_=1e-6)
        deviation = math.sqrt(variance(mine) * len(mine) / max(len(mine) - 1, 1))
        if deviation > 1e-3:
            close(group_whitened(scores, groups)[i], (float(scores[i]) - mean(mine)) / deviation, rel=1e-4)


@given(table(rows=4, width=6), st.sampled_from(sorted(SCALES)))
def test_advantages_of_grpo_ignore_what_does_not_count(columns, scale):
    scores, mask = columns
    result = advantages(scores, scale=scale, mask=mask)
    assert is_finite(result)
    assert bool((result[mask == 0] == 0).all())
    other = advantages(torch.where(mask.bool(), scores, 1e9), scale=scale, mask=mask)
    close(result, other)
    if scale == "none":
        assert abs(float(result.sum())) < 1e-4


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from(sorted(NORMALIZATIONS)), st.data())
def test_the_weights_of_a_step_do_not_depend_on_its_micro_batches(lengths, kind, data):
    totals = Totals(len(lengths), sum(lengths), sum(lengths))
    cut = data.draw(st.integers(0, len(lengths)))
    parts = [part for part in (lengths[:cut], lengths[cut:]) if part]

    def weights(some):
        sequence = torch.repeat_interleave(torch.arange(len(some)), torch.tensor(some))
        return token_weights(kind, sequence, torch.tensor(some), totals=totals, max_completion_length=9)

    close(torch.cat([weights(part) for part in parts]), weights(lengths))
    total = float(weights(lengths).sum())
    assert total <= 1 + 1e-5
    if kind != "dr_grpo":
        close(total, 1.0, rel=1e-5)


@given(table(columns=5), clip)
def test_the_loss_of_ppo_is_the_mean_over_the_tokens(columns, bound):
    new, old, gains, values, returns, mask = columns
    log_ratio = policy_log_ratio(new / 50, old / 50, mask)
    trainer = SimpleNamespace(config=PPOConfig(cliprange=bound, cliprange_value=bound, vf_coef=0.5))
    outputs = (old / 50, values, None, values + 1, new / 50, mask, gains, returns)
    policy, value, stats = PPOTrainer.loss(cast(Any, trainer), *outputs)
    close(policy, mean(at_mask(clipped_surrogate(log_ratio, gains, clip_low=bound, clip_high=bound), mask)), abs_=1e-6)
    worse = torch.maximum((values + 1 - returns) ** 2, (values + bound - returns) ** 2) / 2
    close(clipped_value_loss(values + 1, values, returns, clip=bound), worse)
    close(value, 0.5 * mean(at_mask(worse, mask)), abs_=1e-6)
    assert all(is_finite(stat.value) for stat in stats.values())


@given(st.lists(vectors(1, most=4), min_size=1, max_size=4))
def test_statistics_of_parts_are_those_of_the_whole(parts):
    numbers = [value for (part,) in parts for value in part.tolist()]
    merged = merge_stats([{"m": Mean.of(part), "v": Variance.of(part), "d": Deviation.of(part)} for (part,) in parts])
    close(merged["m"].value, mean(numbers), abs_=1e-6)
    close(merged["v"].value, variance(numbers), abs_=1e-6)
    close(merged["d"].value, math.sqrt(variance(numbers)), abs_=1e-4)
    moments = RunningMoments()
    for (part,) in parts:
        moments.update(part)
    close(moments.mean, mean(numbers), abs_=1e-6)
    assert moments.std > 0


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 10**6)), max_size=20))
def test_an_adaptive_coefficient_stays_a_positive_number(steps):
    controller = AdaptiveKLController(0.2, target=6.0, horizon=100.0)
    for kl, count in steps:
        before = controller.value
        controller.update(kl, count)
        assert is_finite(controller.value)
        assert controller.value > 0
        assert (controller.value >= before) == (kl >= 6.0) or kl == 6.0


@given(vectors(4, numbers=logprob), st.sampled_from(sorted(LOSSES)), st.floats(0.01, 2))
def test_every_preference_loss_is_finite_and_so_is_its_gradient(columns, name, beta):
    chosen = columns[0].clone().requires_grad_()
    lengths = torch.ones(2, len(chosen), dtype=DOUBLE)
    losses = LOSSES[name](PairLogprobs(chosen, *columns[1:], *lengths), beta=beta)
    assert is_finite(losses.detach())
    losses.sum().backward()
    assert is_finite(chosen.grad)


@given(vectors(2), st.integers(1, 20))
def test_a_reward_model_learns_from_differences(columns, bins):
    chosen, rejected = columns
    plain = [math.log1p(math.exp(-abs(d))) + max(-d, 0.0) for d in (chosen - rejected).tolist()]
    close(pair_loss(chosen, rejected), torch.tensor(plain, dtype=DOUBLE))
    close(centering(chosen, rejected), (chosen + rejected) ** 2)
    close(accuracy(chosen, rejected).sum(), sum(float(a > b) for a, b in zip(chosen, rejected, strict=True)))
    assert -1e-9 <= float(calibration(chosen, rejected, bins=bins)) <= 1


@given(vectors(2, numbers=logprob, most=12), st.data())
def test_the_mismatch_of_a_sampler(columns, data):
    mine, sampled = columns
    cut = data.draw(st.integers(0, len(mine)))
    found: Any = mismatch_stats(mine, sampled, lengths=torch.tensor([cut, len(mine) - cut]), cap=None)
    gaps = [float(a - b) for a, b in zip(mine, sampled, strict=True)]
    sums = [math.fsum(part) for part in (gaps[:cut], gaps[cut:]) if part]
    ratios = math.fsum(math.exp(max(-20, min(20, number))) for number in sums)
    close(found["sampling/importance_ratio/mean"].total, ratios, rel=1e-4)
    close(found["sampling/logp_difference/mean"].total, math.fsum(map(abs, gaps)))


@given(st.integers(0, 2**31 - 1), st.floats(0.2, 5), st.integers(2, 30))
def test_samples_of_the_policy_do_not_surprise_it(seed, sharpness, vocabulary):
    generator = torch.Generator().manual_seed(seed)
    logprobs = (sharpness * torch.randn(400, vocabulary, generator=generator, dtype=DOUBLE)).log_softmax(1)
    tokens = torch.multinomial(logprobs.exp(), 1, generator=generator)
    entropy = -(logprobs.exp() * logprobs).sum(1)
    taken = logprobs.gather(1, tokens)[:, 0]
    whole = Surprise.of_tokens(taken, entropy)
    assert abs(whole.value) < 0.05
    parts = [Surprise.of_tokens(taken[part], entropy[part]) for part in torch.arange(400).split(130)]
    close(sum(parts[1:], start=parts[0]).value, whole.value, abs_=1e-9)


@given(vectors(1, most=8), st.floats(0, 5), st.floats(0.01, 1), st.data())
def test_weights_of_reward_weighted_regression(column, beta, top, data):
    (rewards,) = column
    groups = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=len(rewards), max_size=len(rewards))))
    weights = rwr_weights(rewards, groups, beta=beta)
    for group in groups.unique():
        close(weights[groups == group].mean(), 1.0, rel=1e-6)
    best = sparse_weights(rewards, top=top)
    assert float(best[rewards.argmax()]) == 1
    assert float(best.sum()) >= max(1, round(top * len(rewards)))


@given(st.lists(st.tuples(st.sampled_from("ab"), reasonable), min_size=1, max_size=8), st.integers(1, 4))
def test_advantages_against_the_earlier_rewards_of_a_prompt(rows, least):
    tracker, prompts = PerPromptStatTracker(4, least), [prompt for prompt, _ in rows]
    rewards = torch.tensor([reward for _, reward in rows], dtype=DOUBLE)
    for _ in range(2):
        result = tracker.update(prompts, rewards)
        assert is_finite(result)
    again = PerPromptStatTracker(4, least)
    again.load_state_dict(tracker.state_dict())
    close(again.update(prompts, rewards), tracker.update(prompts, rewards))
