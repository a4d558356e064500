"""The attainable frontier: closed forms, the sampler's moves, its errors, and what is committed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import rel_entr, softmax
from transformers import GPT2Config, GPT2LMHeadModel

from experiments import frontier
from experiments.frontier import NOTHING, Endings, Frontier, Tempered, best_of_n, committed_curves, tempered
from experiments.run_folders import Run


class Gaussian:
    """A reference whose answers are standard normal; the reward of a prompt's is mean + deviation * answer."""

    def __init__(self, *deviations: float, mean: float = 0.0, seed: int = 0):
        self.deviations, self.mean, self.rng = np.array(deviations)[:, None], mean, np.random.default_rng(seed)

    def policies(self, samples: int = 4096, **settings: int) -> Tempered:
        answers = self.rng.normal(size=(len(self.deviations), samples))
        return tempered(answers, self.rewards(answers), self, self.rng, **settings)

    def __call__(self, answers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        kept = self.rng.random()
        others = kept * answers + (1 - kept**2) ** 0.5 * self.rng.normal(size=answers.shape)
        return others, self.rewards(others)

    def rewards(self, answers: np.ndarray) -> np.ndarray:
        return self.mean + self.deviations * answers


def test_the_gain_of_gaussian_rewards_is_their_deviation_times_the_root_of_twice_the_kl():
    """Chains that lag behind the policies end below the optimum, the more the further they go."""
    curve = Gaussian(*[0.4] * 32, mean=0.2).policies(ancestors=128).frontier()
    for kl, lag in ((0.2, 0.03), (0.5, 0.03), (1.0, 0.02), (2.0, 0.02), (4.0, 0.03), (8.0, 0.06), (11.9, 0.1)):
        share = (curve.reward(kl) - 0.2) / (0.4 * (2 * kl) ** 0.5)
        assert 1 - lag < share < 1.01


def test_one_beta_for_prompts_of_different_deviations_spends_the_kl_where_it_pays():
    """sigma / beta is the square root of twice the KL: 0.5 and 0.1 share a mean KL of 1 as 1.92 and 0.08 nats."""
    curve = Gaussian(0.5, 0.1).policies(ancestors=256).frontier()
    root_mean_square = (0.5 * (0.5**2 + 0.1**2)) ** 0.5
    assert curve.reward(1.0) == pytest.approx(root_mean_square * 2**0.5, rel=0.05)


def test_two_valued_rewards_have_the_kl_of_their_shares():
    """The reference's share is exact before the first move."""
    rewards = np.repeat([0.0, 1.0], [70, 30])[None]
    policies = tempered(rewards, rewards, lambda answers: (answers, answers), np.random.default_rng(0))
    share = policies.rewards[:20, 0]
    expected = rel_entr(share, 0.3) + rel_entr(1 - share, 0.7)
    assert policies.kls[:20, 0] == pytest.approx(expected, abs=1e-9)
    assert len(policies.rewards) == 21  # more than half of the answers count at every lower beta


def test_half_of_the_answers_count_at_the_next_temperature():
    rewards = np.random.default_rng(0).normal(size=(3, 1000))
    weights = softmax(frontier.largest_step(rewards) * rewards, axis=1)
    assert 1 / (weights**2).sum(axis=1).mean() == pytest.approx(500, rel=1e-3)
    assert frontier.largest_step(np.full((2, 5), 0.3)) == 0


def test_moves_leave_the_optimal_policy_as_it_is_and_moves_without_the_reward_do_not():
    """The optimal policy of a Gaussian reward at 1 / beta is the reference, moved by deviation / beta."""
    reference = Gaussian(1.0)
    answers = reference.rng.normal(loc=2.0, size=(1, 20_000))
    even = np.full(answers.shape, 1 / answers.size)
    settings = {"ancestors": 20_000, "chain": 4}
    means = []
    for inverse_beta in (2.0, 0.0):
        found, rewards = frontier.moved(
            answers, answers, even, reference, reference.rng, inverse_beta=inverse_beta, **settings
        )
        means.append(found[:, 20_000:].mean())
        assert (rewards == found).all()
        assert (found[:, 20_000:] != found[:, :-20_000]).mean() > 0.1
    assert means[0] == pytest.approx(2.0, abs=0.03)
    assert means[1] < 1.8


def test_ancestors_are_drawn_by_their_weights():
    weights = np.array([[0.5, 0.25, 0.25, 0.0], [0.0, 0.0, 0.0, 1.0]])
    answers = np.tile(np.arange(4.0), (2, 1))
    settings = {"inverse_beta": 1.0, "ancestors": 8, "chain": 1}
    found, _ = frontier.moved(
        answers, answers, weights, lambda rows: (rows, rows), np.random.default_rng(0), **settings
    )
    assert [np.bincount(row.astype(int), minlength=4).tolist() for row in found] == [[4, 2, 2, 0], [0, 0, 0, 8]]


def test_efficiency_is_the_gain_over_the_attainable_gain():
    curve = Frontier(np.array([0.0, 4.0]), np.array([5.0, 7.0]), gain_errors=np.array([0.0, 0.1]))
    assert curve.efficiency(2.0, 0.5) == pytest.approx(0.5)
    assert curve.efficiency(2.0, -0.5) == pytest.approx(-0.5)
    assert curve.efficiency(0.0, 0.1) is None
    assert curve.efficiency(-0.1, 0.1) is None
    assert curve.efficiency(4.1, 0.1) is None
    assert curve.relative_error(2.0) == pytest.approx(0.05)
    assert curve.relative_error(4.1) is None


def test_without_differences_nothing_is_attainable():
    rewards = np.full((2, 20), 0.3)
    curve = tempered(rewards, rewards, lambda rows: (rows, rows), np.random.default_rng(0)).frontier()
    assert curve.efficiency(0.1, 0.1) is None


@pytest.mark.parametrize("rewards", [np.zeros(20), np.zeros((3, 1)), np.full((1, 20), np.nan)])
def test_rewards_that_give_no_frontier_are_refused(rewards: np.ndarray):
    with pytest.raises(ValueError, match=r"finite rewards \[prompts, samples\] with at least 2 samples"):
        tempered(rewards, rewards, lambda rows: (rows, rows), np.random.default_rng(0))


def test_the_best_of_n_uniform_rewards_has_their_largest_order_statistic():
    rewards = np.stack([(np.arange(512) + 0.5) / 512, (np.arange(512) + 0.5)[::-1] / 256])
    curve = best_of_n(rewards)
    ns = 2 ** np.arange(9)
    assert curve.rewards == pytest.approx(1.5 * ns / (ns + 1), rel=0.01)  # deviates for n near the number of samples
    assert curve.kls == pytest.approx(np.log(ns) - (ns - 1) / ns)


def test_errors_are_those_of_a_mean_over_prompts():
    """Prompts that differ in their level alone have one curve, moved by that level; their gains do not differ."""
    levels = np.random.default_rng(0).normal(size=10)
    kls = np.linspace(0, 2, 21)
    policies = Tempered(2 * kls**0.5, np.repeat(kls[:, None], 10, axis=1), levels + (kls**0.5)[:, None])
    curve = policies.frontier()
    assert curve.errors == pytest.approx(levels.std(ddof=1) / 10**0.5, rel=1e-6)
    assert curve.gain_errors == pytest.approx(0, abs=1e-9)
    assert curve.rewards[20] == pytest.approx(levels.mean() + 1)  # at 1 nat


class Words:
    """A tokenizer whose token i is the word wi; a prompt has as many tokens as words."""

    eos_token_id = pad_token_id = 0

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word[1:]) for word in text.split()]}

    def batch_decode(self, rows: list[torch.Tensor], **_: bool) -> list[str]:
        return [self.decode(row) for row in rows]

    def decode(self, row: torch.Tensor, **_: bool) -> str:
        return "".join(f" w{i}" for i in row.tolist() if i)


@pytest.fixture
def endings(monkeypatch: pytest.MonkeyPatch) -> Endings:
    class Loader:
        def __init__(self, loaded: object):
            self.from_pretrained = lambda name: loaded

    monkeypatch.setattr(frontier, "stories15m", lambda: "folder")
    torch.manual_seed(0)
    shape = {"vocab_size": 8, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0, pad_token_id=0))
    monkeypatch.setattr(frontier, "AutoModelForCausalLM", Loader(model))
    monkeypatch.setattr(frontier, "AutoTokenizer", Loader(Words()))
    monkeypatch.setattr(frontier, "sentiment", lambda texts: [text.count("w1") - text.count("w2") for text in texts])
    return Endings(["w3", "w4 w5"], max_new_tokens=4, seed=0)


def test_the_reference_writes_an_answers_end_anew_and_keeps_its_beginning(endings: Endings):
    answers, rewards = endings.first(64)
    assert answers.shape == (2, 64, 4)
    assert (rewards == (answers == 1).sum(2) - (answers == 2).sum(2)).all()
    assert (answers[answers[..., 0] == 0][:, 1:] == NOTHING).all()  # nothing after the end
    others, other_rewards = endings.written(answers, 2)
    assert (others[..., :2] == answers[..., :2]).all()
    assert (others != answers).any()
    has_ended = answers[..., 2] == NOTHING
    assert has_ended.any()
    assert (others[has_ended] == answers[has_ended]).all()
    assert (other_rewards == (others == 1).sum(2) - (others == 2).sum(2)).all()
    assert (endings(answers)[0] != endings(answers)[0]).any()


def test_the_policies_of_a_model_rise_from_the_reference(endings: Endings):
    policies = tempered(*endings.first(256), endings, np.random.default_rng(0), farthest=3.0)
    assert policies.kls[0] == pytest.approx(0)
    assert policies.kls[-1].mean() >= 3
    assert (np.diff(policies.rewards.mean(1)) > 0).all()


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
    assert curve.kls[-1] >= 11.9


@pytest.mark.parametrize(
    "other", [{"model": "gpt2"}, {"eval_split": "tune"}, {"max_new_tokens": 24}, {"eval_prompts": 127}]
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


def test_the_program_writes_the_curves_of_its_openings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endings: Endings
):
    monkeypatch.setattr(frontier, "COMMITTED", tmp_path / "attainable.json")
    monkeypatch.setattr(frontier, "SAMPLES", 256)
    monkeypatch.setattr(frontier, "PROMPTS", (2, 3))
    monkeypatch.setattr(frontier, "FARTHEST", 2.0)
    monkeypatch.setattr(frontier, "openings", lambda split: ["w3", "w4 w5", "w6", "w7"])
    monkeypatch.setattr(frontier, "SETTINGS", dict(frontier.SETTINGS) | {"max_new_tokens": 4})
    frontier.main()
    own = OF_COMMITTED | {"max_new_tokens": 4}
    for count in (2, 3):
        curves = committed_curves(own | {"eval_prompts": count})
        assert curves["attainable"].kls[-1] > 1.9
        assert curves["best of n"].rewards[0] == pytest.approx(curves["attainable"].rewards[0], abs=1e-3)
    assert committed_curves(own) == {}
