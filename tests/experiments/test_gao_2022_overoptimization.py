"""Overoptimization: the gold score and its proxies, the paper's curve, a run of two steps, verdicts on made-up runs."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tests.lm import tiny

from experiments import sentiment_ppo
from experiments.gao_2022_overoptimization import gold, train
from experiments.gao_2022_overoptimization.curve import Fit, fit, running_mean
from experiments.gao_2022_overoptimization.gold import learn_head, logistic_regression, mean_states, sentence_vectors
from experiments.gao_2022_overoptimization.proxy import Normalised, Proxy, gold_and_proxy, learn_proxy, text_states
from experiments.gao_2022_overoptimization.report import CLAIM, TITLE, judge
from experiments.reports import report_on
from experiments.runs import Run, read_history

WORDS = ["bad", "good", "dog", "cat", "red", "sad", "big", "odd"]


def reviews() -> Dataset:
    texts = [f"{'good' if i % 2 else 'bad'} {WORDS[i // 2 % 8]} {WORDS[i // 16]}" for i in range(60)]
    return Dataset.from_dict({"text": texts, "label": [i % 2 for i in range(60)]})


def openings() -> list[str]:
    return ["the cat", "a dog", "he went", "so it", "one day", "at the", "in a", "his dog"]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Folder of a tiny Llama and its tokenizer, policy and encoder alike; made-up reviews and openings."""
    tiny.llama(max_position_embeddings=256).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr(gold, "imdb_reviews", reviews)
    monkeypatch.setattr(train, "openings", openings)
    monkeypatch.setattr(sentiment_ppo, "openings", openings)
    return str(tmp_path / "model")


# Gold and proxy --------------------------------------------------------------------------------------------------


def test_logistic_regression_finds_the_log_odds():
    labels = torch.tensor([1, 1, 1, 0])
    weight, bias = logistic_regression(torch.full((4, 1), 2.0), labels, penalty=0.0, bias=False)
    assert float(weight) == pytest.approx(math.log(3) / 2, abs=1e-4)
    assert float(bias) == 0
    weight, bias = logistic_regression(torch.zeros(4, 1), labels, penalty=1.0)
    assert float(weight) == 0
    assert float(bias) == pytest.approx(math.log(3), abs=1e-4)


def test_a_penalty_balances_the_gradient_of_the_loss():
    x, labels = torch.tensor([[1.0], [-1.0]]), torch.tensor([1, 0])
    weight, _ = logistic_regression(x, labels, penalty=0.5, bias=False)
    w = float(weight)
    assert 0.5 * w == pytest.approx(2 / (1 + math.exp(w)), abs=1e-4)


def test_a_mean_of_states_is_that_of_the_row_alone_however_long_the_others_are():
    model, rows = tiny.llama().model.eval(), tiny.rows(5, 2, 9)
    together = mean_states(model, rows, batch_size=3)
    for row, state in zip(rows, together, strict=True):
        with torch.no_grad():
            states = model(input_ids=row[None]).last_hidden_state[0]
        torch.testing.assert_close(state, states.mean(0), rtol=1e-4, atol=1e-5)


def test_vectors_have_length_one_and_a_head_on_them_tells_reviews(model: str):
    encoder, tokenizer = tiny.llama(max_position_embeddings=256).model.eval(), tiny.tokenizer()
    vectors = sentence_vectors(encoder, tokenizer, ["a cat", "the dog went on"])
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(2))
    head = learn_head(encoder, tokenizer, reviews())
    assert head["liked"] > 0.7
    assert 0 <= head["whole"] <= 1
    score = gold.Gold(encoder, tokenizer, head["weight"], head["bias"])
    good, bad = score(["good dog", "bad dog"])
    assert good > bad


def test_a_garbled_text_has_as_many_words_all_of_them_its_own():
    text = "a b c d e f g h"
    garbled = gold.garbled(text, random.Random(0)).split()
    assert len(garbled) == 8
    assert set(garbled) < set(text.split())


def test_a_proxy_ranks_the_pairs_it_has_learnt_as_gold_does():
    trunk, tokenizer = tiny.llama(max_position_embeddings=256).model.eval(), tiny.tokenizer()
    first = ["the cat", "he", "dogs are here", "", "we go", "see", "abc", "on it"]
    second = ["he sees", "a bee", "it", "be", "so", "eel", "xyz", "no"]

    def letters(texts: Any) -> list[float]:
        return [text.count("e") + len(text) / 100 for text in texts]

    proxy = learn_proxy(trunk, tokenizer, (first, second), letters, first + second, penalty=1e-3)
    better = [a > b for a, b in zip(letters(first), letters(second), strict=True)]
    assert [a > b for a, b in zip(proxy(first), proxy(second), strict=True)] == better
    assert_is_minimum(proxy, first, second, better, penalty=1e-3)
    weak = learn_proxy(trunk, tokenizer, (first, second), letters, first + second, penalty=1e3)
    assert weak.weight.norm() < proxy.weight.norm() / 10


def assert_is_minimum(proxy: Proxy, first: list[str], second: list[str], better: list[bool], penalty: float) -> None:
    """The loss has no slope, in a weight on inputs of variance 1: what the pairs pull is what the penalty pulls."""
    states = text_states(proxy.trunk, proxy.tokenizer, first + second)
    deviation = states.std(0)
    signs = torch.tensor(better).float() * 2 - 1
    gaps = signs[:, None] * (states[: len(first)] - states[len(first) :])
    pull = (torch.sigmoid(-gaps @ proxy.weight)[:, None] * gaps / deviation).sum(0)
    torch.testing.assert_close(pull, penalty * proxy.weight * deviation, rtol=0.05, atol=1e-4)


def test_both_scores_have_mean_0_and_deviation_1_over_the_initial_policys_samples(monkeypatch: pytest.MonkeyPatch):
    samples: list[list[str]] = []
    written = train.gold_and_proxy.__globals__["continued"]

    def spied(*args: Any, **options: Any) -> Any:
        rows, texts = written(*args, **options)
        samples.append(texts)
        return rows, texts

    monkeypatch.setitem(train.gold_and_proxy.__globals__, "continued", spied)
    both = gold_and_proxy(
        tiny.llama(max_position_embeddings=256),
        tiny.tokenizer(),
        lambda texts: [float(len(text)) for text in texts],
        openings(),
        labels=6,
        baseline=12,
        penalty=1.0,
        max_new_tokens=6,
        seed=3,
    )
    initial, first, second = samples
    assert (len(initial), len(first), len(second)) == (12, 6, 6)
    assert first != second
    for score in both:
        values = torch.tensor(score(initial))
        assert float(values.mean()) == pytest.approx(0, abs=1e-5)
        assert float(values.std(correction=0)) == pytest.approx(1, abs=1e-5)


def test_normalised_is_in_deviations():
    score = Normalised(lambda texts: [float(text) for text in texts], ["1", "3"])
    assert score(["1", "2", "5"]) == [-1, 0, 3]


# The curve -------------------------------------------------------------------------------------------------------


def test_the_fit_finds_the_curve_that_points_lie_on_and_leaves_out_those_at_0():
    true = Fit(alpha=0.9, beta=0.4)
    distances = [0.0, 0.5, 1.0, 3.0, 7.0]
    fitted = fit(distances, [5.0, *map(true, distances[1:])])
    assert (fitted.alpha, fitted.beta) == pytest.approx((0.9, 0.4))
    assert true(0.0) == 0
    assert true(1.0) == 0.9


def test_the_peak_is_where_the_curve_is_highest():
    curve = Fit(alpha=0.9, beta=0.4)
    highest = max((i / 1000 for i in range(10000)), key=curve)
    assert curve.peak == pytest.approx(highest, abs=2e-3)
    assert Fit(alpha=0.9, beta=-0.1).peak == Fit(alpha=0.9, beta=0.0).peak == math.inf


def test_one_distance_is_too_few():
    with pytest.raises(ValueError, match="two different ones above 0"):
        fit([0.0, 2.0, 2.0], [0.0, 1.0, 1.1])


def test_a_running_mean_is_over_neighbours():
    assert running_mean([1, 2, 3, 6], 3) == [2, pytest.approx(11 / 3)]
    assert running_mean([1, 3], 5) == [2]


# The run ---------------------------------------------------------------------------------------------------------


def test_help_is_shown_and_the_defaults_are_valid(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        train.settings(["--help"])
    assert "--labels" in capsys.readouterr().out
    run, ppo = train.settings(["--labels=7"])
    assert run.labels == 7
    assert (ppo.init_kl_coef, ppo.adap_kl_ctrl) == (0, False)


def test_two_steps_on_a_tiny_model_log_gold_beside_the_proxy(model: str, tmp_path: Path):
    run = train.RunConfig(model=model, encoder=model, labels=4, baseline=8, max_new_tokens=4, eval_prompts=2, samples=1)
    sizes = {"steps": 2, "batch_size": 4, "mini_batch_size": 2, "log_with": "none", "output_dir": str(tmp_path / "run")}
    train.main(run, train.settings([], **sizes)[1])
    history = read_history(tmp_path / "run")
    assert len(history) == 2
    for row in history:
        assert math.isfinite(row["gold/mean"])
        assert row["gold/mean"] != row["ppo/mean_scores"]
        assert row["objective/kl_coef"] == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["labels"] == 4
    assert (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "run" / "figure.png").read_bytes().startswith(b"\x89PNG")


# Verdicts --------------------------------------------------------------------------------------------------------


def made_up(labels: int, seed: int = 0, *, peak: float, beta: float = 0.4, slope: float = 0.5, steps: int = 40) -> Run:
    """A run whose gold follows the paper's curve, highest at `peak`, and whose proxy rises by `slope` d."""
    curve = Fit(alpha=beta * (math.log(peak) + 1), beta=beta)
    distances = [8 * i / steps for i in range(steps)]
    rows = [
        {"step": i + 1, "objective/kl": d * d, "ppo/mean_scores": slope * d, "gold/mean": curve(d)}
        for i, d in enumerate(distances)
    ]
    return Run(Path("nowhere"), {"labels": labels, "seed": seed}, rows, {})


def outcomes(runs: list[Run]) -> dict[str, bool]:
    return {verdict.claim: verdict.passed for verdict in judge(runs).verdicts}


def test_curves_that_peak_and_fall_and_move_out_pass():
    runs = [
        made_up(labels, seed, peak=peak + seed / 10) for labels, peak in ((32, 1.5), (128, 3.0)) for seed in range(3)
    ]
    passed = outcomes(runs)
    assert len(passed) == 8
    assert all(passed.values())
    report = judge(runs)
    (further,) = [verdict for verdict in report.verdicts if "further out" in verdict.claim]
    assert further.expected == "above 1.60 (1.50 to 1.70)"
    assert further.obtained == "3.10 (3.00 to 3.20)"
    assert list(report.figures) == ["figure"]


def test_gold_that_does_not_fall_in_one_seed_fails():
    passed = outcomes([made_up(32, 0, peak=1.5), made_up(32, 1, peak=50.0)])
    assert passed == {
        "32 labels: gold rises": True,
        "32 labels: gold then falls": False,
        "32 labels: the proxy rises from gold's peak to the end": True,
    }


def test_gold_that_never_rises_fails():
    assert outcomes([made_up(32, peak=0.2)])["32 labels: gold rises"] is False


def test_a_proxy_that_falls_fails():
    assert (
        outcomes([made_up(32, peak=2.0, slope=-0.5)])["32 labels: the proxy rises from gold's peak to the end"] is False
    )


def test_a_peak_that_comes_earlier_with_more_labels_fails():
    passed = outcomes([made_up(32, peak=3.0), made_up(128, peak=2.0)])
    assert passed["128 labels: peaks further out (root of the KL) than 32"] is False
    assert passed["128 labels: reach a higher gold than 32"] is False


def test_a_peak_behind_the_last_step_counts_as_there():
    verdicts = judge([made_up(32, peak=3.0), made_up(128, peak=1e6)]).verdicts
    (further,) = [verdict for verdict in verdicts if "further out" in verdict.claim]
    assert float(further.obtained) < 8


def test_a_short_run_is_drawn_and_not_judged():
    report = judge([made_up(32, peak=2.0, steps=2)])
    assert report.verdicts == []
    assert list(report.figures) == ["figure"]


def test_a_run_of_another_experiment_is_refused():
    with pytest.raises(ValueError, match="logged no gold/mean"):
        judge([Run(Path("elsewhere"), {"seed": 0}, [{"step": 1, "objective/kl": 0.0}], {})])


def test_a_report_on_folders_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = made_up(32, peak=2.0)
    (tmp_path / "config.json").write_text(json.dumps(run.config))
    (tmp_path / "history.jsonl").write_text("\n".join(map(json.dumps, run.history)) + "\n")
    (tmp_path / "summary.json").write_text("{}")
    assert all(verdict.passed for verdict in report_on(TITLE, CLAIM, judge, [tmp_path]))
    assert "pass  32 labels: gold then falls" in capsys.readouterr().out
