"""Compares intervals and tests over seeds and prompts with scipy, hand counts and simulated experiments.

Simulated shares are of 20,000 experiments or as many as stated, with fixed random numbers. BEYOND standard errors of
such a share are allowed for chance.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiments.claims import Claim, Verdict, from_json, judge, rounded, to_json, write_numbers
from experiments.statistics import (
    Sample,
    by_group,
    crossed,
    holm,
    holm_levels,
    p_of_little,
    power_of_difference,
    power_of_little,
    sample_of,
)

CLAIM = Claim("a is more than b", ("a", "b"), "more", 0.5, "reward")
LEVELS = (0.05, 0.0125, 0.00625)  # Holm's for one, four and eight claims
BEYOND = 4
Noise = Callable[[np.random.Generator, Sequence[int]], np.ndarray]
NOISES: dict[str, Noise] = {  # mean 0, variance 1
    "normal": lambda rng, shape: rng.normal(size=shape),
    "t3": lambda rng, shape: rng.standard_t(3, size=shape) / 3**0.5,
    "exponential": lambda rng, shape: rng.exponential(size=shape) - 1,
    "lognormal": lambda rng, shape: (rng.lognormal(size=shape) - np.e**0.5) / ((np.e - 1) * np.e) ** 0.5,
}


def experiments(
    noise: str,
    *,
    of_seed: float = 0.0,
    of_prompt: float = 0.0,
    of_both: float = 0.0,
    seeds: int = 8,
    prompts: int = 1,
    groups: Sequence[int] = (),
    is_unequal: bool = False,
    is_paired: bool = False,
    count: int = 20_000,
) -> np.ndarray:
    """Returns null effects [count, S, P] with a part per seed, a part per prompt or group, and an independent part.

    groups: the sizes of groups of prompts that share their part. is_unequal: the seeds' deviations differ, by a factor
    of 2.6 between their quartiles. is_paired: effects are differences of two settings with the same noise.
    """
    rng, draw = np.random.default_rng(7), NOISES[noise]
    scale = np.exp(0.7 * rng.normal(size=(count, seeds, 1))) if is_unequal else 1.0

    def one() -> np.ndarray:
        by_seed = of_seed * scale * draw(rng, (count, seeds, 1))
        by_prompt = of_prompt * draw(rng, (count, 1, len(groups) or prompts))
        shared = np.repeat(by_prompt, groups, axis=2) if groups else by_prompt
        return by_seed + shared + of_both * scale * draw(rng, (count, seeds, shared.shape[2]))

    return one() - one() if is_paired else one()


def p_values(effects: np.ndarray) -> np.ndarray:
    means, errors, freedom = crossed(effects)
    return 2 * stats.t.sf(abs(means) / errors, freedom)


def shares_significant(effects: np.ndarray) -> list[float]:
    return [float((p_values(effects) <= level).mean()) for level in LEVELS]


def allowed(level: float, *, count: int = 20_000) -> float:
    return level + BEYOND * (level * (1 - level) / count) ** 0.5


DESIGNS = {
    "seeds alone": {"of_seed": 1.0},
    "seeds and prompts": {"of_seed": 0.1, "of_prompt": 0.1, "of_both": 0.4, "prompts": 48},
    "neither seeds nor prompts": {"of_both": 0.4, "prompts": 48},
    "prompts": {"of_prompt": 0.3, "of_both": 0.4, "prompts": 48},
    "seeds": {"of_seed": 0.1, "of_both": 0.4, "prompts": 48},
    "few prompts": {"of_seed": 0.1, "of_prompt": 0.1, "of_both": 0.2, "prompts": 8},
    "unequal seeds": {"of_seed": 1.0, "is_unequal": True},
    "unequal seeds, prompts": {"of_seed": 0.1, "of_prompt": 0.1, "of_both": 0.4, "prompts": 48, "is_unequal": True},
    "groups": {"of_seed": 0.05, "of_prompt": 0.2, "of_both": 0.3, "groups": [6] * 8},
}


def table_of(design: dict, noise: str, *, count: int = 20_000) -> np.ndarray:
    """The effects of a design; groups, where it has some, are the columns."""
    effects = experiments(noise, **design, count=count)
    if sizes := design.get("groups"):
        return by_group(effects, np.repeat(np.eye(len(sizes), dtype=bool), sizes, axis=1))
    return effects


@pytest.mark.parametrize("noise", ["normal", "t3"])
@pytest.mark.parametrize("design", DESIGNS)
def test_a_null_effect_is_significant_as_often_as_the_level_says(design: str, noise: str):
    count = 6_000
    shares = shares_significant(table_of(DESIGNS[design], noise, count=count))
    for level, share in zip(LEVELS, shares, strict=True):
        assert share <= allowed(level, count=count), (level, shares)


@pytest.mark.parametrize("noise", ["exponential", "lognormal"])
def test_skewed_noise_cancels_where_two_settings_are_compared(noise: str):
    """The difference of two settings with the same distribution is symmetric."""
    for design in ({"of_seed": 1.0}, {"of_seed": 0.1, "of_prompt": 0.1, "of_both": 0.4, "prompts": 16}):
        shares = shares_significant(experiments(noise, **design, is_paired=True, count=10_000))
        assert all(share <= allowed(level, count=10_000) for level, share in zip(LEVELS, shares, strict=True)), shares


@pytest.mark.parametrize(
    ("noise", "expected"), [("exponential", (0.107, 0.056, 0.040)), ("lognormal", (0.170, 0.102, 0.077))]
)
def test_skewed_noise_of_a_single_setting_is_where_the_test_errs_and_the_page_says_how_often(
    noise: str, expected: Sequence[float]
):
    shares = shares_significant(experiments(noise, of_seed=1.0))
    for share, stated in zip(shares, expected, strict=True):
        assert share == pytest.approx(stated, abs=BEYOND * (stated * (1 - stated) / 20_000) ** 0.5 + 0.001)


def test_prompts_in_groups_are_no_independent_prompts():
    """48 prompts in 8 groups: with the prompts as units a third of all null effects is significant."""
    design = DESIGNS["groups"]
    ungrouped = shares_significant(experiments("normal", **design))[0]
    assert ungrouped > 0.3
    assert shares_significant(table_of(design, "normal"))[0] == pytest.approx(0.05, abs=0.007)
    unequal = {**design, "groups": [2, 2, 2, 3, 3, 3, 4, 4, 5, 5, 7, 8]}
    assert shares_significant(table_of(unequal, "normal"))[0] == pytest.approx(0.058, abs=0.008)


def test_four_groups_are_the_fewest_that_keep_the_level_nearly():
    dominating = {"of_seed": 0.02, "of_both": 0.1, "of_prompt": 0.2}
    sizes = {prompts: shares_significant(experiments("normal", **dominating, prompts=prompts)) for prompts in (2, 3, 4)}
    assert sizes[2][2] > 5 * LEVELS[2]
    assert sizes[3][2] > 1.5 * LEVELS[2]
    assert sizes[4][2] < 2 * LEVELS[2]
    assert sizes[4][0] < 0.06


def test_seeds_alone_would_be_too_sure_of_a_few_prompts():
    """A test that treats prompts as fixed finds effects that come only from the choice of prompts."""
    effects = experiments("normal", of_prompt=1.0, of_both=0.3, prompts=48, count=2_000)
    naive = stats.ttest_1samp(effects.mean(2), 0, axis=1).pvalue
    assert np.mean(naive <= 0.05) > 0.3
    assert shares_significant(effects)[0] < 0.07


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("effect", [1.0, 1.5, 2.0])
def test_the_stated_power_is_the_share_of_planted_effects_that_are_found(effect: float, level: float):
    found = (p_values(experiments("normal", of_seed=1.0) + effect) <= level).mean()
    assert power_of_difference(Sample(0.0, 8**-0.5, 7, 8), effect, level) == pytest.approx(found, abs=0.015)


def test_planted_effects_are_found_under_other_noise_too():
    """At 0.00625 a bootstrap-t of eight seeds finds 1.5 standard deviations in 0.36 of normal experiments."""
    for noise, least in (("normal", 0.62), ("t3", 0.75), ("exponential", 0.78)):
        assert (p_values(experiments(noise, of_seed=1.0, count=5_000) + 1.5) <= 0.00625).mean() > least


@pytest.mark.parametrize("design", ["seeds and prompts", "prompts", "groups"])
def test_the_stated_power_holds_with_prompts(design: str):
    effects = table_of(DESIGNS[design], "normal", count=5_000)
    _, errors, freedom = crossed(effects)
    error = effects.mean((1, 2)).std()
    found = (p_values(effects + 3.5 * error) <= 0.0125).mean()
    assert power_of_difference(Sample(0.0, error, float(np.median(freedom)), 8), 3.5 * error, 0.0125) == pytest.approx(
        found, abs=0.05
    )
    assert np.mean(errors**2) == pytest.approx(error**2, rel=0.12)


def test_the_interval_holds_the_effects_whose_p_value_is_above_the_level():
    sample = sample_of(experiments("normal", of_seed=0.3, of_prompt=0.8, of_both=1.0, prompts=48, count=1)[0] + 0.4)
    for level in (0.05, 0.1):
        low, high = sample.interval(level)
        assert low < sample.mean < high
        for inside, outside in ((low + 1e-3, low - 1e-3), (high - 1e-3, high + 1e-3)):
            assert sample.p_value(inside) > level > sample.p_value(outside)


def test_one_number_a_seed_gives_students_test_over_seeds():
    values = np.random.default_rng(1).normal(loc=0.5, size=9)
    sample = sample_of(values)
    assert sample.p_value(0) == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    assert sample.interval() == pytest.approx(stats.ttest_1samp(values, 0).confidence_interval(0.95))


def test_prompts_that_do_not_differ_leave_students_test_over_seeds():
    seeds = np.array([1.0, 2.0, 4.0, 3.0])
    noise = np.array([[1, -1], [-1, 1], [1, -1], [-1, 1]]) * 0.1  # no difference of the prompts' means
    sample = sample_of(seeds[:, None] + noise)
    assert (sample.freedom, sample.p_value(0)) == pytest.approx((3, stats.ttest_1samp(seeds, 0).pvalue))


def test_the_standard_error_is_that_of_seeds_and_of_prompts_less_the_rest():
    numbers = np.array([[1.0, 3.0], [5.0, 9.0]])
    sample = sample_of(numbers)  # mean squares 25, 9 and 1 with one degree of freedom each
    assert sample.mean == 4.5
    assert sample.error == pytest.approx(((25 + 9 - 1) / 4) ** 0.5)
    assert sample.freedom == pytest.approx(33**2 / (25**2 + 9**2 + 1))


def test_groups_of_equal_size_are_judged_by_their_means_and_the_mean_stays_that_of_prompts():
    table = np.random.default_rng(0).normal(size=(6, 8))
    means = table.reshape(6, 4, 2).mean(2)
    grouped, plain = sample_of(table, "aabbccdd"), sample_of(means)
    assert (grouped.mean, grouped.error, grouped.freedom) == pytest.approx((plain.mean, plain.error, plain.freedom))
    assert sample_of(table, "aaaabbcd").mean == pytest.approx(table.mean())
    with pytest.raises(ValueError, match="each prompt needs its group"):
        sample_of(table, "aabb")


def test_seeds_that_agree_to_the_last_digit_have_the_p_value_of_the_sign_test():
    sample = sample_of([0.25] * 8)
    assert (sample.p_value(0), sample.p_value(0.25)) == (2**-7, 1.0)
    assert sample.interval() == (0.25, 0.25)
    assert p_of_little(sample, 0.5) == (2**-7, 1.0)
    assert p_of_little(sample, 0.1) == (1.0, 2**-7)


@pytest.mark.parametrize(
    ("kind", "margin", "outcome", "p"),
    [
        ("more", 0.1, "reproduced", 2**-7),
        ("little", 0.5, "reproduced", 2**-7),
        ("little", 0.3, "undecided", 1.0),
    ],
)
def test_equal_differences_of_unequal_numbers_are_equal(kind: str, margin: float, outcome: str, p: float):
    """As floating-point numbers, 0.5 - 0.2 and 1.1 - 0.8 are not."""
    for base in (np.round(np.random.default_rng(0).normal(size=(8, 1)), 6), np.arange(24).reshape(8, 3) / 7):
        measured = {"a": dict(enumerate((base + 0.3).tolist())), "b": dict(enumerate(base.tolist()))}
        (verdict,) = judge([Claim("", ("a", "b"), kind, margin, "")], measured)
        assert (verdict.outcome, verdict.p, verdict.low, verdict.agree) == (outcome, p, 0.3, 8)


def test_a_constant_is_not_above_itself_and_its_mean_is_not_above_the_mean():
    constant = Claim("", ("a",), "more", 0.1, "", than=0.9)  # the mean of seven times 0.9 is not 0.9
    numbers = np.random.default_rng(1).normal(size=(8, 50))
    measured = {"a": {seed: [0.9] * 7 for seed in range(8)}}
    assert judge([constant], measured)[0].p == 1.0
    measured = {"a": dict(enumerate(numbers.tolist())), "b": dict(enumerate(numbers[:, ::-1].mean(1).tolist()))}
    (verdict,) = judge([CLAIM], measured)
    assert (verdict.effect, verdict.outcome, verdict.p) == (0.0, "no effect that matters", 2**-7)


@pytest.mark.parametrize("effects", [[1.0], [[1.0, 2.0]], [1.0, float("nan")], []])
def test_too_few_or_broken_numbers_are_refused(effects: list):
    with pytest.raises(ValueError, match="finite numbers"):
        sample_of(effects)


def test_holm_multiplies_the_smallest_by_the_count_and_keeps_the_order():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.5]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("effect", "expected"),
    [(0.0, "holds"), (0.9, "undecided"), (3.0, "does not hold"), (-3.0, "does not hold")],
)
def test_little_is_a_test_of_equivalence(effect: float, expected: str):
    numbers = {seed: effect + noise for seed, noise in enumerate(np.linspace(-0.4, 0.4, 8))}
    (verdict,) = judge([Claim("a matters little", ("a",), "little", 1.0, "reward", origin="ours")], {"a": numbers})
    assert verdict.outcome == expected


def test_equivalence_agrees_with_two_one_sided_t_tests():
    values = np.random.default_rng(3).normal(loc=0.3, size=20)
    above = [stats.ttest_1samp(values, bound, alternative="greater").pvalue for bound in (-0.5, 0.5)]
    inside, outside = p_of_little(sample_of(values), 0.5)
    assert inside == pytest.approx(max(above[0], 1 - above[1]))
    assert outside == pytest.approx(above[0] + above[1])
    assert p_of_little(sample_of(values), 1e-9)[1] == pytest.approx(stats.ttest_1samp(values, 0).pvalue)


def littles(effects: np.ndarray, margin: float) -> tuple[np.ndarray, np.ndarray]:
    """The p-values of p_of_little for many experiments."""
    rows = [p_of_little(Sample(*map(float, row), 8), margin) for row in zip(*crossed(effects), strict=True)]
    return tuple(np.array(rows).T)


def test_an_effect_on_the_margin_is_called_smaller_or_larger_as_often_as_the_level_says():
    inside, outside = littles(experiments("normal", of_seed=1.0, count=4_000) + 1.5, 1.5)
    for level in LEVELS:
        for p in (inside, outside):
            assert (p <= level).mean() <= allowed(level, count=4_000)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("margin", [1.0, 1.5])
def test_the_power_of_equivalence_is_the_share_of_null_experiments_that_show_it(margin: float, level: float):
    shown = (littles(experiments("normal", of_seed=1.0, count=4_000), margin)[0] <= level).mean()
    assert power_of_little(Sample(0.0, 8**-0.5, 7, 8), margin, level) == pytest.approx(shown, abs=0.03)


def test_a_claim_passes_holms_rule_with_a_p_value_up_to_its_level():
    p_values = [0.001, 0.02, 0.03, 0.5]
    levels = holm_levels(p_values)
    assert levels == pytest.approx([0.0125, 0.05 / 3, 0.05 / 3, 0.05 / 3])
    assert holm_levels([0.001, 0.002, 0.003]) == pytest.approx([0.05] * 3)
    for index, level in enumerate(levels):
        for factor, passes in ((0.999, True), (1.001, False)):
            changed = [level * factor if i == index else p for i, p in enumerate(p_values)]
            assert (holm(changed)[index] <= 0.05) == passes


# The judge -------------------------------------------------------------------------------------------------------


def experiment(rng: np.random.Generator, effect: float) -> dict[str, dict[int, list[float]]]:
    """Returns rewards of two settings on the same 8 seeds and 32 prompts."""
    base = rng.normal(size=(8, 1)) * 0.3 + rng.normal(size=(1, 32)) * 0.8 + rng.normal(size=(8, 32))
    return {
        "a": dict(enumerate((base + effect + 0.5 * rng.normal(size=base.shape)).tolist())),
        "b": dict(enumerate((base + 0.5 * rng.normal(size=base.shape)).tolist())),
    }


def share_with_a_false_verdict(effects: Sequence[float], margin: float, *, papers: int) -> float:
    """The share of simulated papers with a false verdict; each makes a claim for each effect, with one control."""
    rng, wrong = np.random.default_rng(6), 0
    claims = [Claim(str(i), (str(i), "control"), "more", margin, "") for i in range(len(effects))]
    true = [
        {"undecided"}
        | ({"no effect that matters"} if abs(effect) < margin else set())
        | ({"reproduced"} if effect > 0 else set())
        | ({"does not carry over"} if effect < 0 else set())
        for effect in effects
    ]
    for _ in range(papers):
        measured = {"control": dict(enumerate(0.7 * rng.normal(size=8)))}
        measured |= {str(i): dict(enumerate(effect + 0.7 * rng.normal(size=8))) for i, effect in enumerate(effects)}
        verdicts = judge(claims, measured)
        wrong += any(verdict.outcome not in right for verdict, right in zip(verdicts, true, strict=True))
    return wrong / papers


@pytest.mark.parametrize(
    ("effects", "margin"), [([0.0] * 8, 0.2), ([0.0] * 4 + [3.0] * 4, 1.0), ([1.2] * 4 + [-1.2] * 2 + [0.0] * 2, 1.2)]
)
def test_one_of_twenty_papers_at_most_has_a_false_verdict(effects: Sequence[float], margin: float):
    """Pure noise; noise beside strong effects; effects that just matter beside none."""
    assert share_with_a_false_verdict(effects, margin, papers=250) <= allowed(0.05, count=250)


@pytest.mark.parametrize(("kind", "effect"), [("more", 1.0), ("less", -1.0)])
def test_a_strong_effect_is_reproduced_and_its_opposite_contradicted(kind: str, effect: float):
    for seed in range(5):
        measured = experiment(np.random.default_rng(seed), effect)
        (verdict,) = judge([Claim("planted", ("a", "b"), kind, 0.5, "reward")], measured)
        (opposite,) = judge([Claim("planted", ("b", "a"), kind, 0.5, "reward")], measured)
        assert (verdict.outcome, opposite.outcome) == ("reproduced", "does not carry over")
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
    assert outcomes == ["reproduced", "undecided", "does not carry over"]


def test_prompts_are_averaged_where_the_other_side_has_one_number():
    measured = {"a": {0: [1.0, 3.0], 1: [2.0, 4.0]}, "b": {0: 1.0, 1: 1.0}}
    (verdict,) = judge([CLAIM], measured)
    assert (verdict.effect, verdict.means, verdict.seeds) == (1.5, (2.5, 1.0), 2)


def test_a_few_seeds_decide_nothing_however_large_the_effect():
    for count, outcome in ((7, "undecided"), (8, "reproduced")):
        effects = {seed: (10 + seed / 100 + np.linspace(-1, 1, 40)).tolist() for seed in range(count)}
        (verdict,) = judge([Claim("", ("a",), "more", 1.0, "")], {"a": effects})
        assert verdict.outcome == outcome
        assert verdict.p_corrected < 0.05


def test_what_can_be_no_verdict_has_no_chance_of_one():
    def chance(seeds: int, groups: str = "", others: int = 0, noise: float = 0.0) -> float | None:
        claims = [Claim("", ("a",), kind, 1.0, "", groups=tuple(groups)) for kind in ("more", "little")]
        claims += [Claim("", ("b",), "more", 1.0, "")] * others
        measured = {
            "a": {seed: [0.5 + noise * seed] * 8 for seed in range(seeds)},
            "b": dict(enumerate(np.random.default_rng(0).normal(size=seeds))),
        }
        first, second, *_ = judge(claims, measured)
        assert first.power == pytest.approx(second.power, abs=0.01)
        return first.power

    assert chance(8) == chance(8, noise=0.001) == 1.0
    assert chance(7) == chance(7, noise=0.001) == 0.0  # eight seeds are needed
    assert chance(8, "aaabbbcc") == 0.0  # and four groups
    assert chance(8, others=20) == 0.0  # seeds on one side have p = 1/128, more than a twentieth of 0.05


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


@pytest.mark.parametrize("broken", [[float("nan")], [float("inf")], [1.0, float("nan")], []])
@pytest.mark.parametrize("seeds", [[3], range(8)])
def test_a_quantity_without_a_finite_number_is_refused_by_its_name(broken: list, seeds: Sequence[int]):
    measured = {"a": dict.fromkeys(seeds, broken), "b": dict.fromkeys(seeds, 0.5)}
    with pytest.raises(ValueError, match=r"a: got no number, or one that is not finite, for the seeds \[.*3"):
        judge([CLAIM], measured)


def test_verdicts_follow_from_what_a_file_holds():
    measured = rounded(experiment(np.random.default_rng(1), 0.3))
    verdicts = judge([CLAIM], measured)
    claims, numbers, stored = from_json(json.loads(json.dumps(to_json(measured, verdicts))))
    assert judge(claims, numbers) == stored == verdicts


@pytest.mark.parametrize(
    ("origin", "agrees", "disagrees"),
    [
        ("paper", "reproduced", "contradicted"),
        ("adapted", "reproduced", "does not carry over"),
        ("ours", "holds", "does not hold"),
    ],
)
def test_only_a_claim_of_the_paper_is_contradicted(origin: str, agrees: str, disagrees: str):
    numbers = {"a": {seed: 2 + seed / 10 for seed in range(8)}}
    for kind, outcome in (("more", agrees), ("less", disagrees)):
        claim = Claim("", ("a",), kind, 0.5, "", origin=origin, scale="15M parameters")
        (verdict,) = judge([claim], numbers)
        assert verdict.outcome == outcome
        assert verdict.words == outcome + " to 15M parameters" * (outcome == "does not carry over")


def test_an_effect_within_the_margin_does_not_matter_and_has_an_interval_of_nine_tenths():
    values = np.linspace(-0.4, 0.4, 8)
    (verdict,) = judge([Claim("", ("a",), "more", 0.5, "")], {"a": dict(enumerate(values))})
    assert (verdict.outcome, verdict.coverage, verdict.agree) == ("no effect that matters", 0.9, 8)
    assert (verdict.low, verdict.high) == pytest.approx(stats.ttest_1samp(values, 0).confidence_interval(0.9))
    assert "(90%: " in verdict.obtained
    (wide,) = judge([Claim("", ("a",), "more", 0.1, "")], {"a": dict(enumerate(values))})
    assert wide.outcome == "undecided"


def test_few_groups_of_prompts_decide_nothing():
    effects = {seed: [1.0 + seed / 100] * 8 for seed in range(8)}
    for groups, outcome in (("aabbccdd", "reproduced"), ("aaabbbcc", "undecided"), ("", "reproduced")):
        (verdict,) = judge([Claim("", ("a",), "more", 0.1, "", groups=tuple(groups))], {"a": effects})
        assert verdict.outcome == outcome


def test_the_power_is_that_of_the_level_that_the_other_claims_leave():
    numbers = np.random.default_rng(0).normal(size=8)
    claims = [Claim(str(i), (str(i),), "more", 0.3, "") for i in range(4)]
    (alone,) = judge(claims[:1], {"0": dict(enumerate(numbers))})
    first = judge(claims, {str(i): dict(enumerate(numbers)) for i in range(4)})[0]
    sample = sample_of(numbers)
    assert alone.power == pytest.approx(power_of_difference(sample, 0.3, 0.05))
    assert first.power == pytest.approx(power_of_difference(sample, 0.3, 0.0125))


def test_a_verdict_is_one_line_and_a_row_has_what_a_reader_needs():
    verdict = Verdict(CLAIM, "reproduced", (0.4, 0.1), 0.3, 0.95, 0.1, 0.5, 0.001, 0.004, 0.97, 7, 8)
    assert str(verdict) == "reproduced    a is more than b   +0.3 (+0.1 to +0.5): 0.4 against 0.1 reward"
    assert verdict.cells() == (
        "reproduced",
        "a is more than b (adapted)",
        "no number known to us",
        "+0.3 (+0.1 to +0.5): 0.4 against 0.1 reward",
        "0.004",
        "7 of 8",
        "97% to find 0.5",
    )


def test_a_file_of_numbers_has_a_list_in_each_line_and_every_word(tmp_path: Path):
    content = {
        "about": "Commit 1 [x, y]",
        "measured": {"a, b": {"1": [0.5, -1e-07, 3], "2": []}},
        "compared": ["p", "q"],
    }
    write_numbers(tmp_path / "numbers.json", content)
    text = (tmp_path / "numbers.json").read_text()
    assert json.loads(text) == content
    assert '   "1": [0.5, -1e-07, 3],' in text.splitlines()
