"""The frontier of DPO and PPO: pairs, a two-step run of each program, and what the report reads."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot as plt
from tests.lm import tiny

from experiments import sentiment_ppo
from experiments.claims import judge
from experiments.frontier import Frontier, best_within
from experiments.rafailov_2023_dpo_frontier import grpo, pairs, ppo, raft, report, sft, train
from experiments.rafailov_2023_dpo_frontier.report import points_of, read
from experiments.run_folders import Run, finished_runs

OPENINGS = ["the cat", "a dog", "he went", "so it", "one day", "at the"]


@pytest.fixture(autouse=True)
def _figures_are_closed() -> Iterator[None]:
    yield
    plt.close("all")


def by_letters(completions: list[str], **_: object) -> list[float]:
    return [float(text.count("e") - text.count("a")) for text in completions]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Writes a tiny Llama and its tokenizer; replaces the openings and the reward by ones that suit its characters."""
    tiny.llama(max_position_embeddings=256).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    for module in (pairs, sentiment_ppo, grpo, raft):
        monkeypatch.setattr(module, "openings", lambda split: OPENINGS)
    for module in (pairs, train, sft, ppo, grpo, raft):
        monkeypatch.setattr(module, "sentiment", by_letters)
    return str(tmp_path / "model")


# The runs --------------------------------------------------------------------------------------------------------

SIZES = {"max_new_tokens": 6, "eval_prompts": 2, "samples": 1, "look_every": 1}


def offline(model: str, **others: Any) -> pairs.RunConfig:
    return pairs.RunConfig(model=model, prompts=4, per_prompt=6, **SIZES | others)


def arguments(tmp_path: Path) -> dict[str, Any]:
    quiet = {"report_to": "none", "logging_steps": 1, "use_cpu": True}
    rate = {"learning_rate": 1e-2, "lr_scheduler_type": "constant", "warmup_steps": 0}
    return {"output_dir": str(tmp_path / "run"), "max_steps": 3, **rate, **quiet}


@pytest.mark.parametrize("program", [train, sft], ids=["dpo", "sft"])
def test_learning_from_pairs_is_looked_at_on_its_way(
    program: ModuleType, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    program.main(offline(model), program.settings([], **arguments(tmp_path))[1])
    (run,) = finished_runs(tmp_path)
    steps, kls = run.curve("step", "eval_kl")
    assert steps == [0, 1, 2, 3]
    assert kls[0] == pytest.approx(0, abs=1e-4)
    assert all(abs(kl) > 1e-3 for kl in kls[1:])
    assert (run.summary["kl"], run.summary["scored_texts"]) == (kls[-1], 24)
    assert len(run.curve("step", "loss")[0]) >= 3  # an evaluation removes no step's numbers
    samples = json.loads((run.folder / "samples.json").read_text())
    assert list(samples) == ["query", "before", "after", "reward"]
    rewards = dict(zip(OPENINGS, run.per_prompt["reward"], strict=False))
    assert samples["reward"] == [rewards[query] for query in samples["query"]]
    assert fmean(run.per_prompt["reward"]) == pytest.approx(run.summary["reward"])
    assert fmean(run.per_prompt["reward_before"]) == pytest.approx(run.summary["reward_before"])
    assert "KL to the reference" in capsys.readouterr().out


def test_ppo_is_looked_at_on_its_way(model: str, tmp_path: Path):
    sizes = {"steps": 3, "batch_size": 4, "mini_batch_size": 2, "learning_rate": 1e-2}
    folders = {"output_dir": str(tmp_path / "run"), "model": model}
    ppo.main(*ppo.settings([], log_with=None, **folders, **sizes, **SIZES))
    (run,) = finished_runs(tmp_path)
    steps, kls = run.curve("step", "eval_kl")
    assert steps == [1, 2]
    assert abs(kls[1]) > 1e-3
    points = set(points_of(run))
    assert {(0, run.summary["reward_before"]), (run.summary["kl"], run.summary["reward"])} <= points
    assert set(zip(*run.curve("eval_kl", "eval_reward"), strict=True)) <= points


def test_grpo_is_looked_at_on_its_way_and_counts_its_texts(model: str, tmp_path: Path):
    sizes = {"per_device_train_batch_size": 2, "num_generations": 4, "max_completion_length": 6}
    grpo.main(*grpo.settings([], model=model, **arguments(tmp_path), **sizes, **SIZES))
    (run,) = finished_runs(tmp_path)
    steps, kls = run.curve("step", "eval_kl")
    assert steps == [0, 1, 2, 3]
    assert kls[0] == pytest.approx(0, abs=1e-4)
    assert abs(kls[-1]) > 1e-3
    assert run.summary["scored_texts"] == 3 * 2 * 4
    assert report.method_of(run) == "GRPO"
    with pytest.raises(ValueError, match="Give both the same number"):
        grpo.main(*grpo.settings([], model=model, **arguments(tmp_path), **SIZES))


def test_raft_is_looked_at_between_its_rounds_and_counts_its_texts(model: str, tmp_path: Path):
    sizes = {"rounds": 3, "prompts": 4, "k": 2, "look_every": 2, "per_device_train_batch_size": 2}
    settings = {name: value for name, value in arguments(tmp_path).items() if name != "max_steps"}
    raft.main(*raft.settings([], model=model, **settings, **SIZES | sizes))
    (run,) = finished_runs(tmp_path)
    kls, _ = run.curve("eval_kl", "eval_reward")
    assert kls[0] == pytest.approx(0, abs=1e-4)
    assert len(kls) == 3  # before, after two rounds, at the end
    assert len({*kls}) == 3
    rounds, means, best = (run.curve(name, name)[0] for name in ("round", "reward", "reward_of_best"))
    assert rounds == [1, 2, 3]
    assert all(mean < highest for mean, highest in zip(means, best, strict=True))
    assert run.summary["scored_texts"] == 3 * 4 * 2
    assert report.method_of(run) == "RAFT"


# Pairs -----------------------------------------------------------------------------------------------------------


def test_four_answers_give_six_pairs_and_ties_none():
    answers = ["I hate it.", "It is a table.", "I love it.", "It is good.", "A chair.", "A door.", "I like it.", "A."]
    love, good, table, hate = 2, 3, 1, 0
    expected = {(love, good), (love, table), (love, hate), (good, table), (good, hate), (table, hate)}
    pairs_of_texts = pairs.every_pair(answers, per_prompt=4)
    assert len(pairs_of_texts) == 9
    assert {pair for pair in pairs_of_texts if max(pair) < 4} == expected
    assert {pair for pair in pairs_of_texts if max(pair) >= 4} == {(6, 4), (6, 5), (6, 7)}


def test_an_answer_without_a_word_is_in_no_pair():
    assert pairs.every_pair(["I love it.", "", "I hate it.", " ", "", "I love it."], per_prompt=3) == [(0, 2)]


def test_a_pair_holds_the_models_own_tokens(model: str):
    policy, tokenizer = pairs.load(model)
    rows = pairs.sampled_pairs(policy, tokenizer, offline(model), seed=0)
    assert rows
    for pair in rows:
        assert tokenizer.decode(pair["prompt"]) in OPENINGS[:4]
        chosen, rejected = (
            by_letters([tokenizer.decode(pair[side], skip_special_tokens=True)])[0] for side in ("chosen", "rejected")
        )
        assert chosen > rejected
        assert all(1 <= len(pair[side]) <= 6 for side in ("chosen", "rejected"))


def test_answers_that_are_all_alike_are_refused(model: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pairs, "sentiment", lambda texts: [0.0] * len(texts))
    with pytest.raises(ValueError, match=r"No prompt of 4 .* Raise prompts"):
        pairs.sampled_pairs(*pairs.load(model), offline(model), seed=0)


def test_runs_share_pairs_of_one_seed_and_not_of_another(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    policy, tokenizer = pairs.load(model)
    shared = offline(model, pairs_folder=str(tmp_path / "pairs"))
    fresh = pairs.sampled_pairs(policy, tokenizer, shared, seed=0)
    assert pairs.pairs_of(policy, tokenizer, shared, seed=0) == fresh
    other = pairs.pairs_of(policy, tokenizer, shared, seed=1)
    assert other != fresh
    monkeypatch.setattr(pairs, "sampled_pairs", None)
    assert pairs.pairs_of(policy, tokenizer, shared, seed=0) == fresh
    assert pairs.pairs_of(policy, tokenizer, shared, seed=1) == other


def test_the_answer_alone_is_learnt():
    assert pairs.learnt([5, 6], [7, 8, 9])["labels"] == [-100, -100, 7, 8, 9]
    row = train.columns({"prompt": [5, 6], "chosen": [7], "rejected": [8, 9]}, ignored=-7)
    assert row["rejected_labels"] == [-7, -7, 8, 9]
    assert row["chosen_input_ids"] == [5, 6, 7]


# The report ------------------------------------------------------------------------------------------------------

SETTINGS = {
    "DPO": {"loss_type": "sigmoid"},
    "IPO": {"loss_type": "ipo"},
    "SFT on the chosen": {},
    "PPO": {"init_kl_coef": 0.1, "steps": 3, "batch_size": 4, "horizon": 8.0},
    "PPO, the paper's controller": {"init_kl_coef": 0.1, "steps": 3, "batch_size": 4, "horizon": 40.0},
    "PPO, 2,048 texts": {"init_kl_coef": 0.1, "steps": 64, "batch_size": 32, "horizon": 64.0},
    "RAFT": {"rounds": 2},
}
SHARED = {"model": "stories15m", "eval_split": "test", "eval_prompts": 2, "max_new_tokens": 16}


def run_of(folder: Path, method: str, seed: int, *points: tuple[float, float], texts: int = 12) -> Run:
    """Returns a run evaluated at these (KL, reward) points, the last one at its end; it starts with a reward of 0.1."""
    history = [{"step": i + 1, "eval_kl": kl, "eval_reward": reward} for i, (kl, reward) in enumerate(points)]
    summary = {"reward_before": 0.1, "kl": points[-1][0], "reward": points[-1][1], "scored_texts": texts}
    (folder / "samples.json").write_text(json.dumps({"query": ["a"], "before": ["b"], "after": [method]}))
    return Run(folder, {"seed": seed, **SHARED, **SETTINGS[method]}, history, summary)


@pytest.fixture
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "reference_curves", lambda runs: {})


@pytest.mark.usefixtures("no_curves")
def test_each_method_and_seed_has_its_best_reward_within_each_budget(tmp_path: Path):
    runs = [run_of(tmp_path, "DPO", 0, (2, 0.3)), run_of(tmp_path, "DPO", 0, (4, 0.4))]
    runs += [run_of(tmp_path, "PPO", 0, (2, 0.2), (8, 0.5)), run_of(tmp_path, "IPO", 1, (1, 0.98))]
    measured = read(runs).measured
    assert [measured[f"reward within {budget} nats, DPO"] for budget in (2, 4, 8)] == [{0: 0.3}, {0: 0.4}, {0: 0.4}]
    assert measured["reward within 4 nats, PPO"] == {0: pytest.approx(0.3)}
    assert measured["reward within 2 nats, IPO"] == {1: 0.98}
    assert not any(name.startswith("efficiency") for name in measured)


@pytest.mark.usefixtures("no_curves")
@pytest.mark.parametrize(("gain", "outcome"), [(0.2, "reproduced"), (-0.2, "does not carry over")])
def test_a_planted_difference_from_ppo_is_found(tmp_path: Path, gain: float, outcome: str):
    runs = []
    for seed in range(10, 18):
        noise = seed / 1000
        runs += [run_of(tmp_path, "DPO", seed, (1, 0.5 + gain + noise)), run_of(tmp_path, "PPO", seed, (1, 0.5))]
    page = read(runs)
    verdicts = judge(page.claims, page.measured)
    assert [verdict.outcome for verdict in verdicts] == [outcome] * 3
    assert [verdict.claim.text.split(" DPO")[0] for verdict in verdicts] == [f"within {b} nats" for b in (2, 4, 8)]


def test_the_efficiency_is_of_the_attainable_gain_within_its_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    curve = Frontier(np.array([0, 3.0]), np.array([0.2, 0.8]))
    monkeypatch.setattr(report, "reference_curves", lambda runs: {"attainable": curve, "best of n": curve})
    page = read([run_of(tmp_path, "DPO", 3, (2, 0.3))])
    measured = page.measured
    assert [line.get_label() for line in page.figures["figure"].axes[0].lines] == ["DPO", "attainable", "best of n"]
    assert measured["efficiency within 2 nats, DPO"] == {3: pytest.approx(0.5)}  # 0.2 of 0.4
    assert "efficiency within 4 nats, DPO" not in measured


@pytest.mark.parametrize("method", ["PPO, the paper's controller", "RAFT", "SFT on the chosen", "IPO"])
def test_a_method_is_known_by_its_settings(tmp_path: Path, method: str):
    assert report.method_of(run_of(tmp_path, method, 0, (1, 0.5))) == method


@pytest.mark.usefixtures("no_curves")
def test_a_method_with_more_scored_texts_is_another_method(tmp_path: Path):
    runs = [run_of(tmp_path, "DPO", 0, (2, 0.3)), run_of(tmp_path, "DPO", 0, (2, 0.6), texts=1200)]
    page = read([*runs, run_of(tmp_path, "PPO", 0, (2, 0.5))])
    best = {name.split("nats, ")[1]: seeds[0] for name, seeds in page.measured.items() if "within 2" in name}
    assert best == {"DPO": 0.3, "PPO": 0.5, "DPO, 1,200 texts": 0.6}
    assert "12 texts: 1 seed, 1,200 texts: 1 seed." in page.captions["figure"]
    few, many = page.figures["figure"].axes
    assert [axis.get_title() for axis in (few, many)] == ["(a) 12 scored texts a run", "(b) 1,200 scored texts a run"]
    assert [line.get_label() for line in few.lines] == ["DPO", "PPO"]
    assert [line.get_label() for line in many.lines] == ["DPO"]
    assert few.lines[0].get_color() == many.lines[0].get_color() != few.lines[1].get_color()
    np.testing.assert_allclose(many.collections[0].get_offsets(), [[0, 0.1], [2, 0.6]])


@pytest.mark.usefixtures("no_curves")
def test_the_caption_counts_seeds_and_the_points_beyond_the_figure(tmp_path: Path):
    runs = [run_of(tmp_path, "DPO", seed, (2, 0.3), (13, 0.4)) for seed in (0, 1)]
    caption = read([*runs, run_of(tmp_path, "PPO", 0, (2, 0.5))]).captions["figure"]
    assert "12 texts: 2 seeds (PPO: 1)." in caption
    assert "up to 12 nats; 2 lie further" in caption


@pytest.mark.usefixtures("no_curves")
def test_a_run_that_diverged_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"finite number: .*nan.* Leave out this run"):
        read([run_of(tmp_path, "DPO", 0, (float("nan"), 0.3), (2, 0.4))])


@pytest.mark.usefixtures("no_curves")
@pytest.mark.parametrize("changes", [None, {"beta": 1.0}], ids=["a run is missing", "a run has another setting"])
def test_each_seed_of_a_method_needs_the_same_runs(tmp_path: Path, changes: dict | None):
    runs = [run_of(tmp_path, "DPO", seed, (1, 0.3)) for seed in (0, 0, 1, 1)]
    runs = [replace(run, config={**run.config, "beta": 0.1 * (i % 2)}) for i, run in enumerate(runs)]
    read(runs)
    *_, last = runs
    others = [] if changes is None else [replace(last, config=last.config | changes)]
    with pytest.raises(ValueError, match=r"DPO: the seeds \[1\] have other runs than seed 0"):
        read([*runs[:-1], *others])


@pytest.mark.usefixtures("no_curves")
@pytest.mark.parametrize(
    ("seeds", "outcomes"), [(7, ["undecided"] * 3), (8, ["holds", "holds", "no effect that matters"])]
)
def test_claims_about_more_texts_are_decided_from_eight_seeds_on(tmp_path: Path, seeds: int, outcomes: list[str]):
    runs = []
    for seed in range(10, 10 + seeds):
        noise = seed / 1000
        runs += [run_of(tmp_path, "DPO", seed, (1, 0.3)), run_of(tmp_path, "PPO", seed, (1, 0.3))]
        runs += [run_of(tmp_path, "DPO", seed, (1, 0.5 + noise), texts=2048)]
        runs += [run_of(tmp_path, "PPO, 2,048 texts", seed, (1, 0.5))]
    page = read(runs)
    about_texts = [verdict for verdict in judge(page.claims, page.measured) if "2,048" in verdict.claim.text]
    assert [verdict.outcome for verdict in about_texts] == outcomes


def test_policies_can_be_mixed_up_to_the_budget():
    points = [(0, 0.1), (2.0, 0.2), (6.0, 0.9)]
    assert best_within(points, 0) == 0.1
    assert best_within(points, 3) == pytest.approx(0.5)  # half the first and half the last
    assert best_within(points, 6) == best_within(points, 9) == 0.9
    assert best_within([*points, (1.0, 0.5)], 2) == pytest.approx(0.58)  # a fifth of the way from 1 to 6 nats
    assert best_within([(0, 0.4), (1.0, 0.2)], 5) == 0.4
