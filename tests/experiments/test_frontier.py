"""The attainable frontier: closed forms, the range, the bias, and the bank of samples."""

from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from scipy.special import rel_entr

from experiments import frontier
from experiments.frontier import attainable, attainable_with_errors, best_of_n, committed_curves
from experiments.run_folders import Run


def gaussian(samples: int, *, deviation: float = 1.0, mean: float = 0.0) -> np.ndarray:
    """Returns the quantiles of a normal distribution, [samples]."""
    return stats.norm.ppf((np.arange(samples) + 0.5) / samples, mean, deviation)


def test_the_gain_of_gaussian_rewards_is_their_deviation_times_the_root_of_twice_the_kl():
    curve = attainable(gaussian(100_000, deviation=0.4, mean=0.2)[None])
    for kl in (0.05, 0.5, 2.0):
        assert curve.reward(kl) == pytest.approx(0.2 + 0.4 * (2 * kl) ** 0.5, rel=0.01)


def test_one_beta_for_prompts_of_different_deviations_spends_the_kl_where_it_pays():
    """sigma / beta is the square root of twice the KL: 0.5 and 0.1 share a mean KL of 1 as 1.92 and 0.08 nats."""
    curve = attainable(np.stack([gaussian(100_000, deviation=deviation) for deviation in (0.5, 0.1)]))
    root_mean_square = (0.5 * (0.5**2 + 0.1**2)) ** 0.5
    assert curve.reward(1.0) == pytest.approx(root_mean_square * 2**0.5, rel=0.01)


def test_two_valued_rewards_have_the_kl_of_their_shares():
    curve = attainable(np.repeat([0.0, 1.0], [70, 30])[None], least_effective=5)
    for kl, share in list(zip(curve.kls, curve.rewards, strict=True))[1:-1:40]:
        expected = rel_entr(share, 0.3) + rel_entr(1 - share, 0.7)
        assert kl == pytest.approx(expected, abs=1e-9)
    assert curve.rewards[-1] == pytest.approx(1.0)
    assert curve.kls[-1] == pytest.approx(np.log(1 / 0.3))  # all weight on the better 30%


def test_the_curve_ends_where_the_effective_samples_do():
    """For Gaussian rewards the effective share of samples is exp(-2 KL)."""
    curve = attainable(gaussian(200_000)[None], least_effective=20_000)
    assert curve.kls[-1] == pytest.approx(np.log(10) / 2, rel=0.03)
    assert curve.reward(curve.kls[-1] + 0.01) is None
    assert curve.efficiency(curve.kls[-1] + 0.01, 1.0) is None


def test_few_samples_give_too_low_a_frontier():
    rng = np.random.default_rng(0)
    few = [attainable(rng.normal(size=(1, 50)), least_effective=2).reward(1.0) for _ in range(200)]
    errors = np.asarray(few, dtype=float) - 2**0.5
    assert errors.mean() < -3 * errors.std() / len(errors) ** 0.5


def test_efficiency_is_the_gain_over_the_attainable_gain():
    curve = attainable(gaussian(100_000, mean=5.0)[None])
    assert curve.efficiency(2.0, 1.0) == pytest.approx(0.5, rel=0.01)
    assert curve.efficiency(2.0, -1.0) == pytest.approx(-0.5, rel=0.01)
    assert curve.efficiency(0.0, 0.1) is None
    assert curve.efficiency(-0.1, 0.1) is None


def test_without_differences_nothing_is_attainable():
    curve = attainable(np.full((2, 20), 0.3))
    assert curve.reward(0.0) == pytest.approx(0.3)
    assert curve.efficiency(0.1, 0.1) is None


@pytest.mark.parametrize("rewards", [np.zeros(20), np.zeros((3, 4)), np.full((1, 20), np.nan)])
def test_rewards_that_give_no_frontier_are_refused(rewards: np.ndarray):
    with pytest.raises(ValueError, match=r"finite rewards \[prompts, samples\] with at least 10 samples"):
        attainable(rewards)


def test_the_best_of_n_uniform_rewards_has_their_largest_order_statistic_and_lies_below_the_frontier():
    rewards = np.stack([(np.arange(512) + 0.5) / 512, (np.arange(512) + 0.5)[::-1] / 256])
    curve = best_of_n(rewards)
    ns = 2 ** np.arange(9)
    assert curve.rewards == pytest.approx(1.5 * ns / (ns + 1), rel=0.01)  # deviates for n near the number of samples
    assert curve.kls == pytest.approx(np.log(ns) - (ns - 1) / ns)
    optimum = attainable(rewards)
    inside = curve.kls <= optimum.kls[-1]
    assert (np.interp(curve.kls[inside], optimum.kls, optimum.rewards) >= curve.rewards[inside] - 1e-3).all()


def test_the_bank_is_sampled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    calls = []

    class Loader:
        from_pretrained = staticmethod(lambda name: name)

    def continued(model: str, tokenizer: str, prompts: list[str], **settings: int) -> tuple[None, list[str]]:
        calls.append(settings)
        return None, [f"{prompt} {i}" for i, prompt in enumerate(prompts)]

    monkeypatch.setattr(frontier, "stories15m", lambda: "folder")
    monkeypatch.setattr(frontier, "AutoModelForCausalLM", Loader)
    monkeypatch.setattr(frontier, "AutoTokenizer", Loader)
    monkeypatch.setattr(frontier, "continued", continued)
    for _ in range(2):
        assert frontier.stories_answers(["a", "b"], samples=2, max_new_tokens=3) == [["a 0", "a 1"], ["b 2", "b 3"]]
    frontier.stories_answers(["a", "b"], samples=2, max_new_tokens=4)
    assert [call["max_new_tokens"] for call in calls] == [3, 4]


def test_errors_are_those_of_a_mean_over_prompts():
    """Prompts that differ in their level alone have one curve, moved by that level."""
    levels = np.random.default_rng(0).normal(size=10)
    curve = attainable_with_errors(levels[:, None] + gaussian(1_000, deviation=0.5))
    assert curve.errors == pytest.approx(levels.std(ddof=1) / 10**0.5, rel=1e-6)
    assert curve.rewards[20] == pytest.approx(levels.mean() + 0.5 * 2**0.5, rel=0.01)  # at 1 nat


OF_COMMITTED = {"model": "stories15m", "eval_split": "test", "max_new_tokens": 16, "eval_prompts": 128}


def test_the_committed_frontier_rises_from_the_reference_and_lies_above_the_best_of_n():
    curves = committed_curves(OF_COMMITTED)
    curve, best = curves["attainable"], curves["best of n"]
    assert curve.kls[0] == best.kls[0] == 0
    assert curve.rewards[0] == pytest.approx(best.rewards[0], abs=1e-3)
    assert (np.diff(curve.rewards) > 0).all()
    assert (np.diff(curve.rewards, 2) < 1e-3).all()  # concave
    inside = best.kls <= curve.kls[-1]
    assert (np.interp(best.kls[inside], curve.kls, curve.rewards) >= best.rewards[inside] - 1e-3).all()
    assert ((curve.errors > 0) & (curve.errors < 0.05)).all()


@pytest.mark.parametrize(
    "other", [{"model": "gpt2"}, {"eval_split": "tune"}, {"max_new_tokens": 24}, {"eval_prompts": 31}]
)
def test_the_committed_curves_are_of_their_settings_alone(tmp_path: Path, other: dict):
    assert committed_curves(OF_COMMITTED | other) == {}
    assert frontier.efficiency_at_end(OF_COMMITTED | other, {"reward_before": 0.2, "reward": 0.5, "kl": 2.0}) == {}
    runs = [Run(tmp_path, settings, [], {}) for settings in (OF_COMMITTED, OF_COMMITTED | other)]
    assert frontier.reference_curves(runs[:1]).keys() == {"attainable", "best of n"}
    assert frontier.reference_curves(runs) == {}


def test_a_run_that_gains_all_that_is_attainable_has_an_efficiency_of_1_and_beyond_the_curve_none():
    curve = committed_curves(OF_COMMITTED)["attainable"]
    numbers = {"reward_before": 0.3, "kl": 2.0, "reward": 0.3 + curve.reward(2.0) - curve.rewards[0]}
    assert frontier.efficiency_at_end(OF_COMMITTED, numbers) == {"efficiency": pytest.approx(1)}
    assert frontier.efficiency_at_end(OF_COMMITTED, numbers | {"kl": curve.kls[-1] + 1}) == {}


def test_the_program_writes_the_curves_of_its_bank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def bank(prompts: list[str], *, samples: int, max_new_tokens: int) -> list[list[str]]:
        return [["good", "bad", *["so"] * (samples - 2)] for _ in prompts]

    monkeypatch.setattr(frontier, "COMMITTED", tmp_path / "attainable.json")
    monkeypatch.setattr(frontier, "SAMPLES", 64)
    monkeypatch.setattr(frontier, "openings", lambda split: ["one", "two", "three"])
    monkeypatch.setattr(frontier, "stories_answers", bank)
    monkeypatch.setattr(
        frontier, "sentiment", lambda texts: [{"good": 1.0, "bad": -1.0}.get(text, 0) for text in texts]
    )
    frontier.main()
    curves = committed_curves(OF_COMMITTED)
    assert curves["best of n"].rewards[:2] == pytest.approx([0, 1 / 32], abs=1e-4)
    assert (curves["attainable"].rewards[0], curves["attainable"].errors.max()) == (0, 0)
