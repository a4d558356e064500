"""The measurements of PPO's value function and KL controller."""

import json
from pathlib import Path

import pytest
import torch
from matplotlib import pyplot as plt

from experiments.claims import from_json, judge
from experiments.run_folders import Run
from experiments.ziegler_2019_sentiment import critic, value_head

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_verdicts_of_the_page_follow_from_the_numbers_beside_it():
    claims, measured, verdicts = from_json(json.loads((DOCS / "ppo-critic.json").read_text(encoding="utf-8")))
    page = (DOCS / "ppo-critic.md").read_text(encoding="utf-8")
    for again, stored in zip(judge(claims, measured), verdicts, strict=True):
        assert again.outcome == stored.outcome
        assert again.effect == pytest.approx(stored.effect)
        assert f"| {again.outcome} | {again.claim.text} |" in page


def made_up(seed: int, rate: float | None, *, explained: float, kl: float, reward: float) -> Run:
    config = {"seed": seed, "value_learning_rate": rate, "target": 4.0}
    row = {critic.EXPLAINED: explained, critic.KL: kl, "objective/kl_coef": 0.1, critic.REWARD: reward}
    history = [{"step": step, **row} for step in range(1, 7)]
    return Run(Path("none"), config, history, {"kl": kl}, {"reward": [reward, reward]})


def test_the_two_settings_are_compared_seed_by_seed():
    before = [made_up(seed, None, explained=0.0, kl=8.0, reward=0.2) for seed in range(8)]
    after = [made_up(seed, 3e-4, explained=0.2, kl=4.0 + seed / 100, reward=0.6) for seed in range(8)]
    report = critic.read(before + after)
    plt.close("all")
    assert report.measured["error of the KL, before"] == dict.fromkeys(range(8), 1.0)
    assert report.measured["error of the KL, after"][0] == 0.0
    assert {verdict.outcome for verdict in judge(report.claims, report.measured)} == {"holds"}


def linear_scores(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns states that are equal at all tokens of a response, and scores linear in them."""
    states = torch.randn(count, 1, 4, generator=torch.Generator().manual_seed(0)).expand(-1, value_head.TOKENS, -1)
    return states, states[:, 0] @ torch.tensor([0.3, -0.2, 0.1, 0.0]) + 0.5


def test_a_ridge_regression_explains_linear_scores():
    assert value_head.by_ridge(*linear_scores(800), 400) > 0.99


def test_a_value_head_explains_linear_scores_after_updates_and_nothing_before_them():
    shares = value_head.by_updates(*linear_scores(960), rate=2e-2, epochs=2, seed=0)
    assert shares[0] == 0.0
    assert min(shares[-10:]) > 0.9
    assert value_head.thirds([shares])[2] > 0.9
