"""RAFT's rounds: what a run of two leaves behind, and the verdicts on made-up runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib import pyplot as plt
from tests.lm import tiny

from experiments.dong_2023_raft import train
from experiments.dong_2023_raft.report import judge
from experiments.runs import Run, finished_runs


@pytest.fixture(autouse=True)
def _figures_are_closed() -> Iterator[None]:
    yield
    plt.close("all")


def test_each_round_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tiny.llama(max_position_embeddings=256).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(train, "openings", lambda: ["the cat", "a dog", "he went", "so it", "one day", "at the"])
    monkeypatch.setattr(train, "sentiment", lambda texts: [text.count("e") for text in texts])
    sizes = {"rounds": 2, "prompts": 2, "k": 4, "max_new_tokens": 6, "eval_prompts": 2, "samples": 1}
    quiet = {"report_to": "none", "use_cpu": True, "logging_steps": 1}
    folders = {"output_dir": str(tmp_path / "run"), "model": str(tmp_path / "model")}
    train.main(*train.settings([], learning_rate=1e-2, **folders, **sizes, **quiet))
    (run,) = finished_runs(tmp_path)
    rounds, rewards = run.curve("round", "eval_reward")
    assert rounds == [0, 1, 2]
    assert (rewards[0], rewards[-1]) == (run.summary["reward_before"], run.summary["reward"])
    assert run.curve("round", "reward_of_best")[0] == [1, 2]
    report = judge([run])
    assert [verdict.claim for verdict in report.verdicts] == ["K = 4: the reward rises each round"]
    assert list(report.samples) == ["query", "before training", "after training, K = 4"]


def run_of(k: int, seed: int, *rewards: float) -> Run:
    """A run with these rewards of held-out prompts, before the first round and after each."""
    history = [
        {"step": i, "round": i, "eval_reward": reward, "reward_of_best": reward} for i, reward in enumerate(rewards)
    ]
    return Run(Path("made"), {"k": k, "seed": seed}, history, {"reward": rewards[-1]})


def passed(runs: list[Run]) -> list[bool]:
    return [verdict.passed for verdict in judge(runs).verdicts]


def test_each_k_above_one_must_rise_and_neighbours_are_compared():
    runs = [run_of(1, 0, 0.2, 0.1, 0.2), run_of(4, 0, 0.2, 0.4, 0.5), run_of(16, 0, 0.2, 0.5, 0.7)]
    report = judge(runs)
    assert [verdict.claim.partition(":")[0] for verdict in report.verdicts] == [
        "K = 4",
        "K = 16",
        "K = 4 climbs faster than K = 1",
        "K = 16 climbs faster than K = 4",
    ]
    assert all(verdict.passed for verdict in report.verdicts)
    assert list(report.figures) == ["figure"]


@pytest.mark.parametrize(
    ("rewards", "rises"),
    [((0.2, 0.4, 0.5), True), ((0.2, 0.4, 0.4), False), ((0.2, 0.95, 0.93), True), ((0.2, 0.89, 0.88), False)],
)
def test_a_round_may_stand_still_only_near_the_most_there_is(rewards: tuple[float, ...], rises: bool):
    assert passed([run_of(4, 0, *rewards)]) == [rises]


def test_the_median_of_the_seeds_must_rise():
    one_falls = [run_of(4, 0, 0.2, 0.4, 0.6), run_of(4, 1, 0.2, 0.4, 0.6), run_of(4, 2, 0.2, 0.4, 0.3)]
    two_fall = [run_of(4, 0, 0.2, 0.4, 0.6), run_of(4, 1, 0.2, 0.4, 0.3), run_of(4, 2, 0.2, 0.4, 0.3)]
    assert passed(one_falls) == [True]
    assert passed(two_fall) == [False]


def test_larger_k_must_climb_faster_in_every_seed():
    slow = [run_of(4, seed, 0.2, 0.4, 0.5, 0.9) for seed in range(2)]
    faster = [run_of(16, 0, 0.2, 0.5, 0.6, 0.7), run_of(16, 1, 0.2, 0.5, 0.6, 0.7)]
    assert passed(slow + faster)[-1]  # the third round is not of the first
    assert not passed([*slow, faster[0], run_of(16, 1, 0.2, 0.4, 0.5, 0.95)])[-1]
    assert passed([run_of(4, 0, 0.2, 0.5, 0.4), run_of(16, 0, 0.2, 0.4, 0.6)])[
        -1
    ]  # the start is of none, the second is


def test_seeds_that_are_not_in_both_are_not_compared():
    assert len(judge([run_of(4, 0, 0.2, 0.4), run_of(16, 1, 0.2, 0.5)]).verdicts) == 2
    assert not judge([run_of(1, 0, 0.2, 0.2)]).verdicts


def test_rounds_without_a_look_are_refused_by_name():
    run = run_of(4, 0, 0.2, 0.4, 0.6)
    cut = Run(Path("cut_run"), run.config, run.history[1:], run.summary)
    with pytest.raises(ValueError, match=r"cut_run.*\[1, 2\].*before the first round"):
        judge([cut])
