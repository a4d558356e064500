"""Compares intervals and tests over seeds and prompts with scipy, hand counts and simulated experiments."""

import json

import numpy as np
import pytest
from scipy import stats

from experiments.claims import Claim, Verdict, from_json, judge, rounded, to_json
from experiments.statistics import bootstrap, holm, p_of_little, power_of_difference, power_of_little

CLAIM = Claim("a is more than b", ("a", "b"), "more", 0.5, "reward")


def crossed(rng: np.random.Generator, *, effect: float = 0.0, seeds: int = 8, prompts: int = 48) -> np.ndarray:
    """Returns effects whose noise has a part per seed, a part per prompt, and an independent part."""
    parts = rng.normal(size=(seeds, 1)) * 0.3, rng.normal(size=(1, prompts)) * 0.8, rng.normal(size=(seeds, prompts))
    return effect + sum(parts)


def share_significant(draw, *, count: int = 300, resamples: int = 999) -> float:
    return float(np.mean([bootstrap(draw(), resamples=resamples).p_value(0) <= 0.05 for _ in range(count)]))


@pytest.mark.parametrize("distribution", ["normal", "exponential", "crossed", "prompts alone"])
def test_a_null_effect_is_significant_in_one_of_twenty_experiments_at_most(distribution: str):
    rng = np.random.default_rng(5)
    draws = {
        "normal": lambda: rng.normal(size=8),
        "exponential": lambda: rng.exponential(size=8) - 1,
        "crossed": lambda: crossed(rng),
        "prompts alone": lambda: rng.normal(size=(1, 48)) + 0.3 * rng.normal(size=(8, 48)),
    }
    # 0.05 plus three standard errors over 300 experiments
    assert share_significant(draws[distribution]) <= 0.05 + 3 * (0.05 * 0.95 / 300) ** 0.5


def test_seeds_alone_would_be_too_sure_of_a_few_prompts():
    """A test that treats prompts as fixed finds effects that come only from the choice of prompts."""
    rng = np.random.default_rng(5)
    naive = [
        stats.ttest_1samp((rng.normal(size=(1, 48)) + 0.3 * rng.normal(size=(8, 48))).mean(1), 0).pvalue
        for _ in range(300)
    ]
    assert np.mean(np.array(naive) <= 0.05) > 0.3


def test_an_effect_is_found_about_as_often_as_the_stated_power_says():
    rng = np.random.default_rng(2)
    found = share_significant(lambda: rng.normal(loc=1.2, size=8))
    exact = bootstrap(rng.normal(size=8) * 0 + np.arange(8) - 3.5)  # only its seeds matter
    normal = type(exact)(0.0, 1 / 8**0.5, 8, exact.ratios)
    assert power_of_difference(normal, 1.2) == pytest.approx(0.83, abs=0.02)  # tables of the one-sample t-test
    assert found == pytest.approx(power_of_difference(normal, 1.2), abs=0.12)


def test_the_interval_holds_the_effects_whose_p_value_is_above_the_level():
    sample = bootstrap(crossed(np.random.default_rng(0), effect=0.4))
    low, high = sample.interval()
    assert low < sample.mean < high
    for inside, outside in ((low + 1e-3, low - 1e-3), (high - 1e-3, high + 1e-3)):
        assert sample.p_value(inside) > 0.05 > sample.p_value(outside)


def test_the_standard_error_is_that_of_seeds_and_of_prompts():
    numbers = np.array([[1.0, 3.0], [5.0, 7.0]])
    sample = bootstrap(numbers)
    assert sample.mean == 4.0
    assert sample.error == pytest.approx((8 / 2 + 2 / 2) ** 0.5)  # means 2 and 6 of the seeds, 3 and 5 of the prompts
    assert bootstrap([2.0, 6.0]).error == pytest.approx(2.0)


def test_seeds_that_agree_to_the_last_digit_have_the_p_value_of_the_sign_test():
    sample = bootstrap([0.25] * 8)
    assert (sample.p_value(0), sample.p_value(0.25)) == (2**-7, 1.0)
    assert sample.interval() == (0.25, 0.25)


@pytest.mark.parametrize("effects", [[1.0], [[1.0, 2.0]], [1.0, float("nan")], []])
def test_too_few_or_broken_numbers_are_refused(effects: list):
    with pytest.raises(ValueError, match="finite numbers"):
        bootstrap(effects)


def test_holm_multiplies_the_smallest_by_the_count_and_keeps_the_order():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.5]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("effect", "expected"), [(0.0, "reproduced"), (0.9, "undecided"), (3.0, "contradicted"), (-3.0, "contradicted")]
)
def test_little_is_a_test_of_equivalence(effect: float, expected: str):
    numbers = {seed: effect + noise for seed, noise in enumerate(np.linspace(-0.4, 0.4, 8))}
    (verdict,) = judge([Claim("a matters little", ("a",), "little", 1.0, "reward")], {"a": numbers})
    assert verdict.outcome == expected


def test_equivalence_agrees_with_two_one_sided_t_tests():
    """scipy's t-test gives the bounds; with many seeds resampling comes near them."""
    values = np.random.default_rng(3).normal(loc=0.1, size=60)
    t_inside = max(
        stats.ttest_1samp(values, -0.5, alternative="greater").pvalue,
        stats.ttest_1samp(values, 0.5, alternative="less").pvalue,
    )
    inside, outside = p_of_little(bootstrap(values), 0.5)
    assert inside == pytest.approx(t_inside, abs=0.005)
    assert outside == pytest.approx(1 - t_inside, abs=0.05)


def test_the_power_of_equivalence_is_the_share_of_null_experiments_that_show_it():
    rng = np.random.default_rng(4)
    shown = np.mean([p_of_little(bootstrap(rng.normal(size=8), resamples=999), 1.5)[0] <= 0.05 for _ in range(300)])
    sample = bootstrap(np.arange(8.0))
    assert shown == pytest.approx(power_of_little(type(sample)(0.0, 1 / 8**0.5, 8, sample.ratios), 1.5), abs=0.12)
    assert power_of_little(sample, 0.01) == 0.0


# The judge -------------------------------------------------------------------------------------------------------


def experiment(rng: np.random.Generator, effect: float) -> dict[str, dict[int, list[float]]]:
    """Returns rewards of two settings on the same 8 seeds and 32 prompts."""
    base = crossed(rng, prompts=32)
    return {
        "a": dict(enumerate((base + effect + 0.5 * rng.normal(size=base.shape)).tolist())),
        "b": dict(enumerate((base + 0.5 * rng.normal(size=base.shape)).tolist())),
    }


def test_a_random_reward_is_reproduced_in_one_of_twenty_papers_at_most():
    """Each paper makes four claims about pure noise; Holm's correction should let none pass."""
    rng = np.random.default_rng(6)
    wrong = 0
    for _ in range(24):
        measured = {f"{i}{name}": numbers for i in range(4) for name, numbers in experiment(rng, 0.0).items()}
        claims = [Claim(str(i), (f"{i}a", f"{i}b"), "more", 0.5, "reward") for i in range(4)]
        wrong += any(verdict.outcome == "reproduced" for verdict in judge(claims, measured))
    assert wrong <= 3  # of 24: at 0.025 per paper, four or more have a probability of 0.003


@pytest.mark.parametrize(("kind", "effect"), [("more", 1.0), ("less", -1.0)])
def test_a_strong_effect_is_reproduced_and_its_opposite_contradicted(kind: str, effect: float):
    for seed in range(5):
        measured = experiment(np.random.default_rng(seed), effect)
        (verdict,) = judge([Claim("planted", ("a", "b"), kind, 0.5, "reward")], measured)
        (opposite,) = judge([Claim("planted", ("b", "a"), kind, 0.5, "reward")], measured)
        assert (verdict.outcome, opposite.outcome) == ("reproduced", "contradicted")
        assert verdict.low < effect < verdict.high
        assert verdict.power > 0.9


def test_noise_that_two_settings_share_cancels():
    base = np.random.default_rng(0).normal(size=8) * 10
    measured = {"a": dict(enumerate((base + np.linspace(0.9, 1.1, 8)).tolist())), "b": dict(enumerate(base.tolist()))}
    assert judge([CLAIM], measured)[0].outcome == "reproduced"


def test_an_effect_is_compared_with_its_threshold():
    numbers = {"a": {seed: 0.5 + seed / 100 for seed in range(8)}}
    outcomes = [
        judge([Claim("", ("a",), "more", 0.1, "", than=than)], numbers)[0].outcome for than in (0.3, 0.535, 0.7)
    ]
    assert outcomes == ["reproduced", "undecided", "contradicted"]


def test_prompts_are_averaged_where_the_other_side_has_one_number():
    measured = {"a": {0: [1.0, 3.0], 1: [2.0, 4.0]}, "b": {0: 1.0, 1: 1.0}}
    (verdict,) = judge([CLAIM], measured)
    assert (verdict.effect, verdict.means, verdict.seeds) == (1.5, (2.5, 1.0), 2)


def test_a_few_seeds_decide_nothing_however_large_the_effect():
    for count, outcome in ((4, "undecided"), (5, "reproduced")):
        effects = {seed: (10 + seed / 100 + np.linspace(-1, 1, 40)).tolist() for seed in range(count)}
        (verdict,) = judge([Claim("", ("a",), "more", 1.0, "")], {"a": effects})
        assert verdict.outcome == outcome
        assert verdict.p_corrected < 0.05


def test_one_seed_decides_nothing_and_what_was_not_measured_is_left_out():
    absent = Claim("c", ("c",), "more", 1.0, "")
    (verdict,) = judge([CLAIM, absent], {"a": {3: 5.0}, "b": {3: 0.0}})
    assert (verdict.outcome, verdict.p, verdict.effect) == ("undecided", None, 5.0)


def test_a_claim_is_judged_by_the_seeds_that_both_sides_have():
    measured = {"a": {0: 1.0, 1: 2.0, 5: 100.0}, "b": {1: 0.5, 0: 0.5, 7: 100.0}}
    (verdict,) = judge([CLAIM], measured)
    assert (verdict.effect, verdict.seeds) == (1.0, 2)
    assert judge([CLAIM], {"a": {0: 1.0}, "b": {1: 1.0}}) == []


@pytest.mark.parametrize("other", [{0: [1.0, 2.0, 3.0], 1: [1.0, 2.0, 3.0]}, {0: [1.0, 2.0], 1: [1.0]}])
def test_other_prompts_on_one_side_or_in_one_seed_are_refused(other: dict):
    with pytest.raises(ValueError, match="same prompts"):
        judge([CLAIM], {"a": {0: [1.0, 2.0], 1: [1.0, 2.0]}, "b": other})


def test_verdicts_follow_from_what_a_file_holds():
    measured = rounded(experiment(np.random.default_rng(1), 0.3))
    verdicts = judge([CLAIM], measured)
    claims, numbers, stored = from_json(json.loads(json.dumps(to_json(measured, verdicts))))
    assert judge(claims, numbers) == stored == verdicts


def test_a_verdict_is_one_line_and_a_row_has_what_a_reader_needs():
    verdict = Verdict(CLAIM, "reproduced", (0.4, 0.1), 0.3, 0.1, 0.5, 0.001, 0.004, 0.97, 8)
    assert str(verdict) == "reproduced    a is more than b   +0.3 (+0.1 to +0.5): 0.4 against 0.1 reward"
    assert verdict.cells() == (
        "reproduced",
        "a is more than b (adapted)",
        "none",
        "+0.3 (+0.1 to +0.5): 0.4 against 0.1 reward",
        "0.004",
        "8",
        "0.97 at 0.5",
    )
