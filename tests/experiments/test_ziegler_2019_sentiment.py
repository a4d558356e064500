"""PPO with an adaptive KL on sentiment: the reward, a run of two steps, and the verdicts on made-up runs."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import pyplot as plt
from tests.common.test_tracking import read_wandb_file
from tests.experiments.test_assets import checkpoint, tensors, tokenizer_bin
from tests.lm import tiny

from experiments import sentiment_ppo
from experiments.assets import convert_llama2c
from experiments.reports import report_on
from experiments.runs import Run
from experiments.sentiment import sentiment
from experiments.sentiment_ppo import Evaluation, StoriesRun, end_at, load, samples_of
from experiments.ziegler_2019_sentiment import train
from experiments.ziegler_2019_sentiment.report import CLAIM, TITLE, judge

ROOT = Path(__file__).resolve().parents[2]


def test_reward_is_the_sign_of_a_sentiment_and_zero_without_one():
    happy, sad, plain, empty = sentiment(
        [
            "She was happy and loved the wonderful party.",
            "He was sad and hated the terrible storm.",
            "It is a table.",
            "",
        ]
    )
    assert 0.5 < happy <= 1
    assert -1 <= sad < -0.5
    assert plain == empty == 0


def test_reward_knows_negation_and_degree():
    good, very_good, not_good = sentiment(["It was good.", "It was very good!", "It was not good."])
    assert not_good < 0 < good < very_good


# The run ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Folder of a tiny Llama that was a llama2.c checkpoint; openings in its words."""
    converted, tokenizer = convert_llama2c(checkpoint(tensors(shared=True)) + tokenizer_bin())
    converted.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(
        sentiment_ppo, "openings", lambda: ["the there", "he there the", "abc", "there there", "the he", "he he"]
    )
    return str(tmp_path / "model")


def test_two_steps_on_a_tiny_model_leave_record_samples_and_page(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = StoriesRun(model=model, max_new_tokens=4, eval_prompts=2, samples=1)
    folder = tmp_path / "run"
    sizes = {"steps": 2, "batch_size": 4, "mini_batch_size": 2}
    _, ppo = train.settings([], **sizes, log_with=None, output_dir=str(folder))
    train.main(run, ppo)
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert json.loads((folder / "config.json").read_text())["max_new_tokens"] == 4
    summary = json.loads((folder / "summary.json").read_text())
    assert {"reward_before", "reward", "kl", "ended", "kl_held"} <= set(summary)
    assert summary["kl_held"] == rows[1]["objective/kl"]
    assert json.loads((folder / "samples.json").read_text())["query"] == ["the there"]
    shown = capsys.readouterr().out
    assert shown.count("[the there]") == 2
    assert "before training" in shown
    assert "the KL is held" in shown
    assert f"figure: {folder / 'figure.png'}" in shown
    assert (folder / "figure.png").exists()
    assert "after, target 8" in (folder / "report.html").read_text()


@pytest.mark.usefixtures("offline_wandb")
def test_a_resumed_run_goes_on_in_the_same_run_of_wandb_which_has_the_settings_of_both(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    sizes = {"batch_size": 4, "mini_batch_size": 2, "save_steps": 1, "output_dir": str(tmp_path / "run")}
    run = StoriesRun(model=model, max_new_tokens=4, eval_prompts=2, samples=1)
    for steps, resume_from in ((1, None), (2, "latest")):
        (_, ppo) = train.settings([], **sizes, steps=steps, seed=3)
        sentiment_ppo.train(replace(run, resume_from=resume_from), ppo, sentiment)
    folders = sorted(tmp_path.glob("wandb/offline-run-*"))
    assert len(folders) == 2
    records = [read_wandb_file(next(folder.glob("*.wandb"))) for folder in folders]
    starts = [record["run"][0] for record in records]
    assert len({start.run_id for start in starts}) == 1
    assert {(start.display_name, start.run_group, start.job_type) for start in starts} == {
        ("seed=3", "ziegler_2019_sentiment", "train")
    }
    updates = [start.config for start in starts] + [config for record in records for config in record["config"]]
    config = {item.key: item.value_json for update in updates for item in update.update}
    assert (config["seed"], config["target"], config["eval_prompts"]) == ("3", "8.0", "2")


def test_stops_end_responses_where_they_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sentiment_ppo, "openings", lambda: ["the cat", "a dog", "he ran", "so"])
    tiny.llama().save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    policy, tokenizer = load(str(tmp_path))
    run = StoriesRun(max_new_tokens=3, eval_prompts=4)
    reward = lambda texts: [float(len(text)) for text in texts]  # noqa: E731
    lengths = []
    for stops in ((), tuple(tiny.CHARACTERS)):
        end_at(policy, tokenizer, stops)
        numbers, _ = Evaluation(policy.pretrained_model, tokenizer, reward, run, seed=0).look()
        lengths.append((numbers["ended"], numbers["reward"]))
    (early, long), (ended, short) = lengths
    assert early < 1
    assert ended > early
    assert short <= 1 < long
    with pytest.raises(ValueError, match=r"\['the end'\] is no token"):
        end_at(policy, tokenizer, ("the end", "a"))


def test_another_trainer_can_be_given(model: str, tmp_path: Path):
    sizes = {"steps": 1, "batch_size": 4, "mini_batch_size": 2}
    _, ppo = train.settings([], **sizes, log_with=None, output_dir=str(tmp_path))
    trainers = []

    def make_trainer(config: Any, policy: Any, **others: Any) -> Any:
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.25)
        trainers.append(sentiment_ppo.PPOTrainer(config, policy, optimizer=optimizer, **others))
        return trainers[0]

    run = StoriesRun(model=model, max_new_tokens=4, eval_prompts=2, samples=1)
    sentiment_ppo.train(run, ppo, sentiment, make_trainer=make_trainer)
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [row["ppo/learning_rate"] for row in rows] == [0.25]
    assert trainers[0].steps_done == 1


@pytest.mark.parametrize("name", ["gpu.yaml"])
def test_the_files_of_settings_are_of_this_program(name: str):
    file = ROOT / "experiments" / "ziegler_2019_sentiment" / name
    run, ppo = train.settings(["--config", str(file)])
    assert run.model == "gpt2"
    assert ppo.target == 12


# The verdicts ----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def close_figures() -> Iterator[None]:
    """judge() draws; only a page that is written closes what it holds."""
    yield
    plt.close("all")


def made_up(
    target: float, seed: int, *, reward: float = 0.5, before: float = 0.2, kl: float | None = None, **others: Any
) -> Run:
    """A run that held its target, unless `kl` says otherwise."""
    config = {"target": target, "seed": seed, "adap_kl_ctrl": True, "init_kl_coef": 0.1, **others}
    held = target if kl is None else kl
    rows = [{"step": i, "ppo/mean_scores": i / 5, "objective/kl": held, "objective/kl_coef": 0.1} for i in (1, 2)]
    summary = {"reward_before": before, "reward": reward, "kl": held, "ended": 0.0, "kl_held": held}
    return Run(Path("none", f"{target}-{seed}"), config, rows, summary)


def outcomes(*runs: Run) -> dict[str, bool]:
    return {verdict.claim: verdict.passed for verdict in judge(runs).verdicts}


def test_all_claims_hold():
    runs = [made_up(target, seed, reward=0.3 + target / 10) for seed in (0, 1, 2) for target in (4.0, 2.0)]
    assert outcomes(*runs) == {
        "target 2: the reward rises": True,
        "target 4: the reward rises": True,
        "target 2: the KL is held": True,
        "target 4: the KL is held": True,
        "target 4 gives more reward than 2": True,
    }


def test_one_seed_in_which_the_reward_fell_fails():
    assert outcomes(made_up(2.0, 0), made_up(2.0, 1, reward=0.1))["target 2: the reward rises"] is False


@pytest.mark.parametrize(("kl", "is_held"), [(3.9, False), (4.1, True), (15.9, True), (16.1, False)])
def test_kl_is_held_within_a_factor_of_two(kl: float, is_held: bool):
    assert outcomes(made_up(8.0, 0), made_up(8.0, 1, kl=kl))["target 8: the KL is held"] is is_held


def test_targets_are_compared_seed_by_seed():
    claim = "target 4 gives more reward than 2"
    paired = [made_up(2.0, 0, reward=0.3), made_up(2.0, 1, reward=0.6), made_up(4.0, 0, reward=0.4)]
    assert outcomes(*paired)[claim] is True  # seed 1 has no other
    assert outcomes(*paired, made_up(4.0, 1, reward=0.5))[claim] is False
    assert claim not in outcomes(made_up(2.0, 0), made_up(4.0, 1))


def test_a_fixed_coefficient_has_no_target_to_hold():
    fixed = [made_up(8.0, 0, adap_kl_ctrl=False), made_up(2.0, 0, adap_kl_ctrl=False, init_kl_coef=0.3)]
    assert outcomes(*fixed) == {
        "coefficient 0.1: the reward rises": True,
        "coefficient 0.3: the reward rises": True,
    }


def test_runs_that_differ_in_more_than_the_seed_are_refused():
    with pytest.raises(ValueError, match=r"target 8 has runs of the seeds \[0, 0\]"):
        judge([made_up(8.0, 0), made_up(8.0, 0, learning_rate=1.0)])


def test_samples_are_of_the_runs_that_answered_the_same_queries(tmp_path: Path):
    runs = {}
    for name, query in (("a", "x"), ("b", "x"), ("c", "y")):
        run = made_up(8.0, 0)
        runs[name] = Run(tmp_path / name, run.config, run.history, run.summary)
        (tmp_path / name).mkdir()
        text = json.dumps({"query": [query], "before": ["old"], "after": [f"new {name}"]})
        (tmp_path / name / "samples.json").write_text(text)
    runs = {"none": made_up(8.0, 1), **runs}
    assert samples_of(runs) == {"query": ["x"], "before training": ["old"], "a": ["new a"], "b": ["new b"]}


def test_the_page_is_made_of_finished_runs(tmp_path: Path):
    run = made_up(8.0, 0)
    (tmp_path / "config.json").write_text(json.dumps(run.config))
    (tmp_path / "summary.json").write_text(json.dumps(run.summary))
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run.history))
    report_on(TITLE, CLAIM, judge, [tmp_path])
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "target 8: the KL is held" in (tmp_path / "report.html").read_text()
