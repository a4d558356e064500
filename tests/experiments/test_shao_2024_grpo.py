"""GRPO on sums: what a run leaves for the report, and what the report says of runs that are given."""

from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.lm import tiny

from experiments.figures import Verdict, exit_code
from experiments.runs import Run, finished_runs
from experiments.shao_2024_grpo import report, train

CONFIG = {
    "per_device_train_batch_size": 4,
    "num_generations": 8,
    "gradient_accumulation_steps": 1,
    "max_steps": 10,
    "steps_per_generation": 1,
    "scale_rewards": "group",
    "seed": 0,
}


def a_run(right: float = 0.6, *, calls: int = 10, seconds: float = 20.0, **config: Any) -> Run:
    """A run that began at 0.4."""
    summary = {"right_before": 0.4, "right": right, "generation_calls": calls, "generation_seconds": seconds}
    history = [{"step": step, "reward": 0.4 + step / 50} for step in (2, 4, 6, 8, 10)]
    return Run(Path("runs", "x"), CONFIG | config, history, summary)


def verdicts_of(runs: list[Run]) -> dict[str, Verdict]:
    """By the words of their claims that tell them apart."""
    words = ("raises accuracy", "over its deviation", "(less the group's mean)", "the calls", "the seconds")
    verdicts = report.judge(runs).verdicts
    named = {word: verdict for verdict in verdicts for word in words if word in verdict.claim}
    assert len(named) == len(verdicts)
    return named


def seeds(*rights: float, **config: Any) -> list[Run]:
    return [a_run(right, seed=seed, **config) for seed, right in enumerate(rights)]


def test_accuracy_must_rise_in_every_seed():
    verdict = verdicts_of(seeds(0.6, 0.5, 0.7))["raises accuracy"]
    assert verdict.passed
    assert verdict.obtained == "0.400 (0.400 to 0.400) before, 0.600 (0.500 to 0.700) after: higher in 3 of 3"
    verdict = verdicts_of(seeds(0.9, 0.4, 0.9))["raises accuracy"]
    assert not verdict.passed
    assert verdict.obtained.endswith("higher in 2 of 3")


def test_each_kind_of_baseline_must_beat_the_reward_itself_in_every_seed():
    raw = seeds(0.5, 0.7, 0.5, scale_rewards="raw")
    verdicts = verdicts_of([*raw, *seeds(0.6, 0.8, 0.51), *seeds(0.9, 0.6, 0.9, scale_rewards="none")])
    assert verdicts["over its deviation"].passed
    assert verdicts["over its deviation"].expected == "higher accuracy after 320 answers, in every seed"
    assert not verdicts["(less the group's mean)"].passed
    assert verdicts["(less the group's mean)"].obtained.endswith("higher in 2 of 3")


def test_only_runs_of_the_same_seed_are_compared():
    verdict = verdicts_of([a_run(0.6, seed=1), *seeds(0.9, 0.5, 0.9, scale_rewards="raw")])["over its deviation"]
    assert verdict.obtained == "0.600 against 0.500: higher in 1 of 1"
    assert verdict.passed


def test_calls_and_seconds_are_judged_apart():
    slow, fast = a_run(), a_run(steps_per_generation=4, calls=2, seconds=8.0)
    verdicts = verdicts_of([slow, fast])
    assert not verdicts["the calls"].passed  # 10 steps are two and a half calls
    assert not verdicts["the seconds"].passed
    assert verdicts["the seconds"].obtained == "2.50 times fewer"
    eight = {"max_steps": 8, "steps_per_generation": 4}
    verdicts = verdicts_of([a_run(max_steps=8, calls=8, seconds=20.0), a_run(calls=2, seconds=5.0, **eight)])
    assert verdicts["the calls"].passed
    assert verdicts["the seconds"].passed


def test_the_median_of_the_seconds_must_reach_the_factor_and_the_calls_in_every_seed():
    ones = [a_run(seed=seed, calls=8, seconds=12.0) for seed in range(3)]
    others = [
        a_run(seed=seed, calls=calls, seconds=seconds, steps_per_generation=4)
        for seed, (calls, seconds) in enumerate([(2, 2.0), (2, 3.0), (4, 6.0)])
    ]
    verdicts = verdicts_of([*ones, *others])
    assert verdicts["the seconds"].passed
    assert not verdicts["the calls"].passed


def test_short_runs_are_not_judged_by_their_accuracy():
    short = {"max_steps": 2}
    verdicts = verdicts_of(
        [*seeds(0.6, 0.6), *seeds(0.3, 0.3, **short), *seeds(0.5, 0.5, scale_rewards="raw", **short)]
    )
    assert verdicts.keys() == {"raises accuracy"}
    assert verdicts["raises accuracy"].passed


def test_there_is_no_verdict_on_what_is_not_there():
    judged = report.judge([a_run(scale_rewards="raw")])
    assert exit_code(judged.verdicts) == 1
    assert not judged.verdicts
    assert list(judged.figures) == ["figure"]
    assert verdicts_of([a_run(steps_per_generation=4)]).keys() == set()


def test_runs_of_something_else_are_named():
    with pytest.raises(ValueError, match=r"no accuracy is in the summary of runs.x\. Give"):
        report.judge([a_run(), replace(a_run(), summary={"reward": 1.0})])


def test_two_runs_are_judged_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Four steps out of one call each, and out of one for all; what an evaluation asks is not counted."""
    seconds = count()
    monkeypatch.setattr(train, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    tiny.llama(max_position_embeddings=256).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    sizes = {"largest": 4, "eval_prompts": 2, "samples": 1, "max_steps": 4, "num_generations": 2}
    quiet = {"model": str(tmp_path / "model"), "report_to": "none", "use_cpu": True, "per_device_train_batch_size": 2}
    for factor in (1, 4):
        folder = str(tmp_path / f"run{factor}")
        train.main(*train.settings([], **sizes, **quiet, output_dir=folder, steps_per_generation=factor))
    runs = finished_runs(tmp_path)
    assert [run.summary["generation_calls"] for run in runs] == [4, 1]
    assert [run.summary["generation_seconds"] for run in runs] == [4.0, 1.0]
    verdicts = verdicts_of(runs)
    assert verdicts["the calls"].passed
    assert verdicts["the seconds"].passed


def test_no_sum_of_the_test_is_learnt_in_either_order():
    data = train.sums(train.RunConfig(largest=9, eval_prompts=20), seed=0)
    asked, learnt = (
        {frozenset(prompt.splitlines()[-1].strip("= ").split(" + ")) for prompt in data[name]["prompt"]}
        for name in ("test", "train")
    )
    assert not asked & learnt
    assert not {frozenset("23"), frozenset("76")} & (asked | learnt)
    pairs = {frozenset((str(a), str(b))) for a in range(1, 10) for b in range(1, 10)}
    assert asked | learnt == pairs - {frozenset("23"), frozenset("76")}
