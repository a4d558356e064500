"""The frontier of DPO and PPO: pairs, a run of two steps of each program, and the verdicts on made-up runs."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from matplotlib import pyplot as plt
from tests.lm import tiny

from experiments import sentiment_ppo
from experiments.rafailov_2023_dpo_frontier import pairs, ppo, sft, train
from experiments.rafailov_2023_dpo_frontier.report import best_within, judge, points_of
from experiments.runs import Run, finished_runs

OPENINGS = ["the cat", "a dog", "he went", "so it", "one day", "at the"]


@pytest.fixture(autouse=True)
def _figures_are_closed() -> Iterator[None]:
    yield
    plt.close("all")


def by_letters(texts: list[str]) -> list[float]:
    return [float(text.count("e") - text.count("a")) for text in texts]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Folder of a tiny Llama and its tokenizer; openings in its characters, and a reward that such texts have."""
    tiny.llama(max_position_embeddings=256).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    for module in (pairs, sentiment_ppo):
        monkeypatch.setattr(module, "openings", lambda: OPENINGS)
    for module in (pairs, train, sft, ppo):
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
    assert len(run.curve("step", "loss")[0]) >= 3  # a look takes no step's numbers away
    assert list(json.loads((run.folder / "samples.json").read_text())) == ["query", "before", "after"]
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


# Pairs -----------------------------------------------------------------------------------------------------------


def test_the_most_positive_answer_is_chosen_and_ties_are_left_out():
    answers = ["It is a table.", "I love it.", "I hate it.", "A chair.", "A door.", "A table."]
    assert pairs.extremes(answers, per_prompt=3) == [(1, 2)]


def test_an_answer_without_a_word_is_in_no_pair():
    assert pairs.extremes(["I love it.", "", "I hate it.", " ", "", "I love it."], per_prompt=3) == [(0, 2)]


def test_a_pair_holds_the_models_own_tokens(model: str):
    policy, tokenizer = pairs.load(model)
    rows = pairs.sampled_pairs(policy, tokenizer, offline(model), seed=0)
    assert rows
    for pair in rows:
        assert tokenizer.decode(pair["prompt"]) in OPENINGS[2:]
        chosen, rejected = (by_letters([tokenizer.decode(pair[side])])[0] for side in ("chosen", "rejected"))
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


# The verdicts ----------------------------------------------------------------------------------------------------

SETTINGS = {
    "DPO": {"loss_type": "sigmoid"},
    "IPO": {"loss_type": "ipo"},
    "SFT": {},
    "PPO": {"init_kl_coef": 0.1, "steps": 3, "batch_size": 4},
}


def run_of(method: str, seed: int, *points: tuple[float, float]) -> Run:
    """A run with looks at these (KL, reward), the last of them at its end; it starts with a reward of 0.1."""
    history = [{"step": i + 1, "eval_kl": kl, "eval_reward": reward} for i, (kl, reward) in enumerate(points)]
    summary = {"reward_before": 0.1, "kl": points[-1][0], "reward": points[-1][1], "scored_texts": 9}
    return Run(Path(), {"seed": seed, **SETTINGS[method]}, history, summary)


def test_dpo_passes_where_its_best_reward_within_a_budget_is_at_least_ppos():
    runs = [run_of("DPO", 0, (2, 0.3)), run_of("DPO", 0, (4, 0.4))]
    runs += [run_of("PPO", 0, (2, 0.2), (8, 0.5)), run_of("SFT", 0, (1, 0.99)), run_of("IPO", 0, (1, 0.98))]
    report = judge(runs)
    assert [verdict.passed for verdict in report.verdicts] == [True, True, False]  # 0.3 : 0.2, 0.4 : 0.3, 0.4 : 0.5
    assert [verdict.obtained for verdict in report.verdicts] == ["0.300", "0.400", "0.400"]
    assert next(iter(report.figures)) == "figure"


def test_as_much_reward_is_a_pass():
    assert all(verdict.passed for verdict in judge([run_of("DPO", 0, (1, 0.5)), run_of("PPO", 0, (2, 0.5))]).verdicts)


def test_the_median_of_the_seeds_decides():
    ppo_runs = [run_of("PPO", seed, (1, 0.5)) for seed in range(3)]
    better, worse = (1, 0.6), (1, 0.4)
    mostly = [run_of("DPO", seed, point) for seed, point in enumerate([better, worse, better])]
    seldom = [run_of("DPO", seed, point) for seed, point in enumerate([worse, worse, better])]
    assert all(verdict.passed for verdict in judge(ppo_runs + mostly).verdicts)
    assert not any(verdict.passed for verdict in judge(ppo_runs + seldom).verdicts)


def test_seeds_that_one_side_lacks_are_left_out():
    runs = [
        run_of("DPO", 0, (1, 0.6)),
        run_of("DPO", 1, (1, 0.0)),
        run_of("DPO", 2, (1, 0.0)),
        run_of("PPO", 0, (1, 0.5)),
    ]
    assert [verdict.obtained for verdict in judge(runs).verdicts] == ["0.600"] * 3


@pytest.mark.parametrize("missing", ["DPO", "PPO"])
def test_without_one_side_there_is_no_verdict_and_the_figure_says_so(missing: str):
    runs = [run_of(method, 0, (1, 0.5)) for method in SETTINGS if method != missing]
    report = judge(runs)
    assert not report.verdicts
    assert "DPO and PPO of one seed are needed" in report.figures["figure"].axes[0].get_title()


def test_policies_can_be_mixed_up_to_the_budget():
    points = [(0, 0.1), (2.0, 0.2), (6.0, 0.9)]
    assert best_within(points, 0) == 0.1
    assert best_within(points, 3) == pytest.approx(0.5)  # half and half of the first and the last
    assert best_within(points, 6) == best_within(points, 9) == 0.9
    assert best_within([*points, (1.0, 0.5)], 2) == pytest.approx(0.58)  # a fifth of the way from 1 to 6 nats
    assert best_within([(0, 0.4), (1.0, 0.2)], 5) == 0.4
