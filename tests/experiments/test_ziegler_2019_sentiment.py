import json
import math
from pathlib import Path

import pytest
from experiments.assets import convert_llama2c
from experiments.ziegler_2019_sentiment import train
from experiments.ziegler_2019_sentiment.report import Summary, read_history, summarize, write_report
from experiments.ziegler_2019_sentiment.reward import sentiment
from tests.experiments.test_assets import checkpoint, tensors, tokenizer_bin


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


def rows(count: int) -> list[dict[str, float]]:
    return [
        {
            "step": i + 1,
            "ppo/mean_scores": i / count,
            "objective/kl": 12.0 * i / count,
            "objective/entropy": 50.0 - i,
            "tokens/responses_len_mean": 24.0,
        }
        for i in range(count)
    ]


def test_summary_compares_the_tenths_and_averages_the_last_third():
    summary = summarize(rows(30), target=8.0)
    assert math.isclose(summary.first_reward, (0 + 1 + 2) / 3 / 30)
    assert math.isclose(summary.last_reward, (27 + 28 + 29) / 3 / 30)
    assert math.isclose(summary.last_kl, 12 * 24.5 / 30)
    assert summary.is_reward_up
    assert summary.is_kl_held


@pytest.mark.parametrize(("kl", "is_held"), [(3.9, False), (4.1, True), (15.9, True), (16.1, False)])
def test_kl_is_held_within_a_factor_of_two(kl: float, is_held: bool):
    assert Summary(first_reward=0.0, last_reward=1.0, last_kl=kl, target=8.0).is_kl_held is is_held


def test_a_resumed_run_replaces_the_steps_it_did_again(tmp_path: Path):
    lines = [
        {"step": 1, "x": 1},
        {"step": 2, "x": 1},
        {"step": 3, "x": 1},
        {"step": 2, "x": 2},
        {"step": 3, "x": 2},
    ]
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [row["x"] for row in read_history(tmp_path / "history.jsonl")] == [1, 2, 2]


@pytest.mark.parametrize("is_adaptive", [True, False])
def test_report_is_drawn_from_what_the_run_wrote(is_adaptive: bool, tmp_path: Path):
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(5)))
    config = {"exp_name": "x", "model": "y", "batch_size": 4, "target": 8.0, "adap_kl_ctrl": is_adaptive}
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = write_report(tmp_path)
    assert path == tmp_path / "report.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_two_steps_on_a_tiny_model_leave_history_config_and_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    model, tokenizer = convert_llama2c(checkpoint(tensors(shared=True)) + tokenizer_bin())
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(train, "openings", lambda: ["the there", "he there the", "abc", "there there"])
    run = train.RunConfig(model=str(tmp_path / "model"), max_new_tokens=4, samples=2)
    ppo = train.SentimentPPOConfig(
        steps=2, batch_size=4, mini_batch_size=2, log_with=None, output_dir=str(tmp_path / "run")
    )
    train.main(run, ppo)
    history = read_history(tmp_path / "run" / "history.jsonl")
    assert [row["step"] for row in history] == [1, 2]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["max_new_tokens"] == 4
    assert (tmp_path / "run" / "report.png").exists()
    shown = capsys.readouterr().out
    assert shown.count("[the there]") == 2
    assert "before training" in shown
    assert "KL per response" in shown
