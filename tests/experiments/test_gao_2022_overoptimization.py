"""Overoptimization: gold and its proxies, best-of-n, the paper's curves, short runs, verdicts on planted runs."""

import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from matplotlib import pyplot as plt
from tests.lm import tiny

from experiments import gold, sentiment_ppo
from experiments.best_of import kl_of_best
from experiments.claims import judge
from experiments.frozen import choice_regression, logistic_regression, mean_states
from experiments.gao_2022_overoptimization import best_of_n, train
from experiments.gao_2022_overoptimization.curve import BEST_OF_N, RL, Fit, Form, fit, running_mean
from experiments.gao_2022_overoptimization.report import FIRST, GOLD, SECOND, Course, fall, read
from experiments.gold import learn_head, sentence_vectors
from experiments.proxy import Normalised, Proxy, Sampler, Samples, learn_weight, text_states
from experiments.run_folders import Run, read_history
from trimtab_lm import PPOConfig

WORDS = ["bad", "good", "dog", "cat", "red", "sad", "big", "odd"]


def reviews() -> Dataset:
    texts = [f"{'good' if i % 2 else 'bad'} {WORDS[i // 2 % 8]} {WORDS[i // 16]}" for i in range(60)]
    return Dataset.from_dict({"text": texts, "label": [i % 2 for i in range(60)]})


def openings(split: str) -> list[str]:
    return ["the cat", "a dog", "he went", "so it", "one day", "at the", "in a", "his dog"]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Writes a tiny Llama and its tokenizer, used as policy and encoder; makes up reviews and openings."""
    tiny.llama(max_position_embeddings=256).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gold, "imdb_reviews", reviews)
    monkeypatch.setattr(train, "openings", openings)
    monkeypatch.setattr(sentiment_ppo, "openings", openings)
    return str(tmp_path / "model")


# Gold and proxy --------------------------------------------------------------------------------------------------


def test_logistic_regression_finds_the_log_odds():
    labels = torch.tensor([1, 1, 1, 0])
    weight, bias = logistic_regression(torch.zeros(4, 1), labels, penalty=1.0)
    assert float(weight) == 0
    assert float(bias) == pytest.approx(math.log(3), abs=1e-4)


def test_a_penalty_balances_the_gradient_of_the_loss():
    x, labels = torch.tensor([[1.0], [-1.0]]), torch.tensor([1, 0])
    weight, bias = logistic_regression(x, labels, penalty=0.5)
    w = float(weight)
    assert 0.5 * w == pytest.approx(2 / (1 + math.exp(w)), abs=1e-4)
    assert float(bias) == pytest.approx(0, abs=1e-6)


def test_choices_give_the_log_odds_of_their_shares():
    """Among three alternatives with features -1, 0 and 1, the softmax must choose each as often as the data do."""
    gaps = {1.0: [2.0, 1.0], 0.0: [1.0, -1.0], -1.0: [-1.0, -2.0]}
    weight = choice_regression(torch.tensor([gaps[1.0]] * 4 + [gaps[0.0]] * 2 + [gaps[-1.0]])[..., None], penalty=0.0)
    assert float(weight) == pytest.approx(math.log(2), abs=1e-4)  # shares 4 : 2 : 1
    doubled = choice_regression(torch.tensor([[1.0], [1.0], [1.0], [-1.0]])[..., None], penalty=0.0)
    assert float(doubled) == pytest.approx(math.log(3), abs=1e-4)


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


def pairs_of(count: int, *, seed: int = 0) -> Samples:
    """Returns two samples per prompt; the gold score is the first of three states, and the others are noise."""
    states = torch.randn(count, 2, 3, generator=torch.Generator().manual_seed(seed)) * torch.tensor([2.0, 1.0, 0.5]) + 1
    return Samples(golds=3 * states[..., 0] + 5, states=states)


def test_a_proxy_learns_what_gold_prefers_and_its_scores_have_variance_1():
    pairs = pairs_of(400)
    weight = learn_weight(pairs, 400, penalty=1e-3)
    scores = pairs.states @ weight
    assert float(scores.std()) == pytest.approx(1)
    assert float(torch.corrcoef(torch.stack([scores.flatten(), pairs.golds.flatten()]))[0, 1]) > 0.99


def test_fewer_labels_are_the_first_of_more():
    pairs, others = pairs_of(40), pairs_of(40, seed=1)
    mixed = Samples(torch.cat([pairs.golds[:10], -pairs.golds[10:]]), pairs.states)
    torch.testing.assert_close(learn_weight(mixed, 10, penalty=1.0), learn_weight(pairs, 10, penalty=1.0))
    assert not torch.allclose(learn_weight(mixed, 40, penalty=1.0), learn_weight(pairs, 40, penalty=1.0))
    assert not torch.allclose(learn_weight(others, 10, penalty=1.0), learn_weight(pairs, 10, penalty=1.0))


@pytest.mark.parametrize("labels", [0, 5])
@pytest.mark.parametrize("setting", ["labels", "bank_labels"])
def test_more_labels_than_comparisons_are_refused(setting: str, labels: int):
    settings = {"labels": 2, "bank_labels": (2, 4)} | {setting: (2, labels) if setting == "bank_labels" else labels}
    with pytest.raises(ValueError, match=rf"from 1 to comparisons=4 labels, got \[{labels}\]"):
        train.RunConfig(comparisons=4, **settings)


def test_samples_are_scored_in_the_order_of_their_prompts_and_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    scored: list[str] = []

    def length(texts: Sequence[str]) -> list[float]:
        scored.extend(texts)
        return [float(len(text)) for text in texts]

    model = tiny.llama(max_position_embeddings=256).eval()
    sampler = Sampler(model, tiny.tokenizer(), length, 6, ("tiny", "length"))
    first = sampler(["the cat", "a dog"], 3, seed=1)
    assert first.golds.flatten().tolist() == [float(len(text)) for text in scored]
    assert first.states.shape == (2, 3, model.config.hidden_size)
    torch.testing.assert_close(first.states.flatten(0, 1), text_states(model.base_model, tiny.tokenizer(), scored))
    again = sampler(["the cat", "a dog"], 3, seed=1)
    torch.testing.assert_close(again.states, first.states, rtol=0, atol=0)
    assert len(scored) == 6
    assert not torch.equal(sampler(["the cat", "a dog"], 3, seed=2).states, first.states)


def test_the_proxy_scores_texts_as_it_scores_their_states():
    model, tokenizer = tiny.llama(max_position_embeddings=256).eval(), tiny.tokenizer()
    weight = torch.randn(model.config.hidden_size)
    texts = ["the cat", "", "a dog went"]
    proxy = Proxy(model.base_model, tokenizer, weight, offset=2.0)
    expected = text_states(model.base_model, tokenizer, texts) @ weight - 2
    assert proxy(texts) == pytest.approx(expected.tolist())


def test_normalised_is_in_deviations():
    score = Normalised(lambda texts: [float(text) for text in texts], [1.0, 3.0])
    assert score(["1", "2", "5"]) == [-1, 0, 3]


# Best-of-n -------------------------------------------------------------------------------------------------------


def test_the_best_by_a_proxy_that_agrees_with_gold_is_the_best_by_gold():
    pairs = pairs_of(200)
    bank_states = torch.randn(2, 4, 3)
    bank = Samples(3 * bank_states[..., 0] + torch.tensor([[0.0], [100.0]]), bank_states)
    (curve,) = best_of_n.best_of_n(bank, pairs, [200], penalty=1e-4)
    assert curve.ns == [1, 2, 4]
    assert curve.correlation > 0.98
    for prompt, golds in enumerate(bank.golds):
        assert curve.gold[prompt][0] == pytest.approx(0, abs=1e-5)  # the gain over the mean sample
        best = float((golds.max() - golds.mean()) / pairs.golds.std())
        assert curve.gold[prompt][2] == pytest.approx(best, abs=0.3 * best)
    assert curve.mean("proxy") == sorted(curve.mean("proxy"))


def test_a_proxy_that_knows_nothing_gains_nothing_of_gold():
    pairs = pairs_of(64)
    states = torch.randn(400, 8, 3)
    bank = Samples(torch.randn(400, 8), states)
    (curve,) = best_of_n.best_of_n(bank, pairs, [64], penalty=1.0)
    assert abs(curve.mean("gold")[-1]) < 3 * 400**-0.5 / float(pairs.golds.std())
    assert curve.mean("proxy")[-1] > 0.5


def test_the_kl_of_the_best_of_n():
    assert kl_of_best(1) == 0
    assert kl_of_best(2) == pytest.approx(0.6931 - 0.5, abs=1e-4)


def test_curves_are_read_as_they_were_written(tmp_path: Path):
    curve = best_of_n.Curve(8, 0.5, [1, 2], [[0.0, 0.5]], [[0.0, 1.0]])
    best_of_n.write(tmp_path, [curve])
    assert best_of_n.read(tmp_path) == [curve]


# The curve -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [RL, BEST_OF_N])
def test_the_fit_finds_the_curve_that_points_lie_on_and_leaves_out_those_at_0(form: Form):
    true = Fit(form, alpha=0.9, beta=0.4)
    distances = [0.0, 0.5, 1.0, 3.0, 7.0]
    fitted = fit(form, distances, [5.0, *map(true, distances[1:])])
    assert (fitted.alpha, fitted.beta, fitted.quality) == pytest.approx((0.9, 0.4, 1.0))
    assert true(0.0) == 0
    other = fit(BEST_OF_N if form == RL else RL, distances, [0.0, *map(true, distances[1:])])
    assert other.quality < 0.99


def test_the_forms_are_those_of_the_paper():
    assert Fit(RL, alpha=0.9, beta=0.4)(math.e) == pytest.approx(math.e * 0.5)
    assert Fit(BEST_OF_N, alpha=0.9, beta=0.4)(2.0) == pytest.approx(2 * 0.1)


def test_two_distances_are_too_few():
    with pytest.raises(ValueError, match="three different ones above 0"):
        fit(RL, [0.0, 2.0, 2.0, 3.0], [0.0, 1.0, 1.1, 1.0])


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


SMALL = {"comparisons": 8, "labels": 4, "bank_labels": (2, 8), "bank_prompts": 2, "bank_samples": 4}


def test_two_steps_on_a_tiny_model_log_gold_beside_the_proxy(model: str, tmp_path: Path):
    run = train.RunConfig(model=model, encoder=model, max_new_tokens=4, eval_prompts=2, samples=1, **SMALL)
    train.main(run, ppo_of(tmp_path / "run", steps=2))
    history = read_history(tmp_path / "run")
    assert len(history) == 2
    for row in history:
        assert row[GOLD] != row["ppo/mean_scores"]
        assert row[GOLD] == pytest.approx((row[FIRST] + row[SECOND]) / 2, abs=1e-5)
        assert row["objective/kl_coef"] == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["labels"] == 4
    curves = best_of_n.read(tmp_path / "run")
    assert [curve.labels for curve in curves] == [2, 8]
    assert [len(row) for row in curves[0].gold] == [3, 3]  # best of 1, 2 and 4, for two prompts
    assert (tmp_path / "run" / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_training_ends_at_the_distance(model: str, tmp_path: Path):
    run = train.RunConfig(
        model=model, encoder=model, max_new_tokens=4, eval_prompts=2, samples=1, distance=0.01, **SMALL
    )
    train.main(run, ppo_of(tmp_path / "run", steps=9, learning_rate=0.05))
    history = read_history(tmp_path / "run")
    assert 1 < len(history) < 9
    far = [row["objective/kl"] >= 0.01**2 for row in history]
    assert far == [False] * (len(far) - 1) + [True]
    assert (tmp_path / "run" / "summary.json").exists()


def ppo_of(folder: Path, **changes: Any) -> PPOConfig:
    sizes = {"batch_size": 4, "mini_batch_size": 2, "log_with": "none", "output_dir": str(folder), **changes}
    ppo: PPOConfig = train.settings([], **sizes)[1]
    return ppo


# Verdicts --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def close_figures() -> Iterator[None]:
    """Closes the figures that read() draws; otherwise only writing a page closes them."""
    yield
    plt.close("all")


def planted(
    folder: Path,
    labels: int,
    seed: int,
    *,
    peak: float,
    beta: float = 0.4,
    slope: float = 0.5,
    steps: int = 40,
    gain: float = 0.2,
    bend: float = 0.3,
) -> Run:
    """Returns a run with the paper's gold curve, highest at `peak`; the proxy rises by `slope` d.

    Best-of-n gains `gain` when the number of labels doubles, and `bend` is beta of one label; beta falls by 0.02.
    """
    curve = Fit(RL, alpha=beta * (math.log(peak) + 1), beta=beta)
    noise = random.Random(f"{labels} {seed}")
    distances = [8 * i / steps for i in range(steps)]
    rows = []
    for step, d in enumerate(distances, start=1):
        halves = [curve(d) + noise.gauss(0, 0.05) for _ in range(2)]
        rows.append({"step": step, "objective/kl": d * d, "ppo/mean_scores": slope * d, GOLD: sum(halves) / 2})
        rows[-1] |= {FIRST: halves[0], SECOND: halves[1]}
    ns = [2**k for k in range(8)]
    farthest = kl_of_best(128) ** 0.5
    banks = []
    for count in (32, 64, 128):
        size, weaker = gain * math.log2(count) + noise.gauss(0, 0.01), bend - 0.02 * math.log2(count)
        form = Fit(BEST_OF_N, alpha=size / farthest + weaker * farthest, beta=weaker)
        gains = [form(kl_of_best(n) ** 0.5) for n in ns]
        banks.append(best_of_n.Curve(count, size / 5, ns, [gains] * 3, [gains] * 3))
    run = Run(folder / f"{labels}-{seed}", {"labels": labels, "seed": seed}, rows, {})
    best_of_n.write(run.folder, banks)
    samples = {"query": ["the cat"], "before": [" sat"], "after": [" good good"], "reward": [1.0]}
    (run.folder / "samples.json").write_text(json.dumps(samples))
    return run


def outcomes(runs: list[Run]) -> dict[str, str]:
    report = read(runs)
    return {verdict.claim.text: verdict.outcome for verdict in judge(report.claims, report.measured)}


def test_planted_overoptimization_is_reproduced(tmp_path: Path):
    peaks = {32: 1.5, 128: 3.0}
    runs = [planted(tmp_path, labels, seed, peak=peaks[labels]) for labels in peaks for seed in range(8)]
    assert outcomes(runs) == {
        "RL, 32 labels: gold rises above the initial policy's": "reproduced",
        "RL, 32 labels: gold falls from its peak to the end": "reproduced",
        "RL, 32 labels: the proxy rises from gold's peak to the end": "reproduced",
        "RL: gold's peak is higher with 128 labels than with 32": "reproduced",
        "best-of-n: gold at the largest n grows with each doubling of the labels": "reproduced",
        "best-of-n: alpha grows with each doubling of the labels": "reproduced",
        "best-of-n: beta falls with each doubling of the labels": "reproduced",
        "best-of-n, 32 labels: gold falls from its peak to the largest n": "no effect that matters",
        "at the KL of the largest n, best-of-n has gained more gold than RL (most labels: best-of-n; 128: RL)": (
            "reproduced"
        ),
        "RL, 32 labels: d (alpha - beta log d) fits gold better than best-of-n's form": "reproduced",
        "best-of-n: d (alpha - beta d) explains more than 0.9 of gold's variance": "reproduced",
    }
    report = read(runs)
    slopes = report.measured["gold of best-of-n for each doubling of the labels"]
    assert sorted(slopes) == list(range(8))
    assert slopes[0] == pytest.approx([0.2] * 3, abs=0.03)
    assert report.measured["beta of best-of-n for each doubling of the labels"][0] == pytest.approx([-0.02] * 3)
    assert report.samples["run"] == ["32 labels", "128 labels"]


def test_gold_that_only_rises_contradicts_the_fall_of_the_proxy_and_not_more(tmp_path: Path):
    runs = [planted(tmp_path, 32, seed, peak=1e6, gain=-0.1) for seed in range(8)]
    results = outcomes(runs)
    assert results["RL, 32 labels: gold rises above the initial policy's"] == "reproduced"
    assert results["RL, 32 labels: gold falls from its peak to the end"] != "reproduced"
    assert results["best-of-n: gold at the largest n grows with each doubling of the labels"] == "does not carry over"


def test_best_of_n_that_turns_over_falls_from_its_peak(tmp_path: Path):
    runs = [planted(tmp_path, 32, seed, peak=1.5, bend=0.9) for seed in range(8)]
    assert outcomes(runs)["best-of-n, 32 labels: gold falls from its peak to the largest n"] == "reproduced"


def test_the_peak_of_best_of_n_is_chosen_by_other_prompts():
    gold = [[0.0, 1.0, 0.5], [0.0, 0.2, 0.6], [0.0, 2.0, 0.0], [0.0, 0.1, 0.7]]
    # The odd prompts choose the largest n for the even ones, which is the end; these choose n = 2 for the odd ones.
    assert fall(gold) == pytest.approx([0.0, -0.4, 0.0, -0.6])
    noise = np.random.default_rng(0).normal(size=(200, 32, 8))
    assert abs(np.mean([fall(rows) for rows in noise])) < 0.05


def test_noise_alone_has_no_peak():
    noise = random.Random(0)
    falls = []
    for _ in range(300):
        halves = tuple([noise.gauss(0, 1) for _ in range(24)] for _ in range(2))
        course = Course([i / 3 for i in range(24)], [0.0] * 24, halves, [0.0] * 24)
        peak = course.at_peak()
        falls.append(peak["gold at its peak"] - peak["gold at the end"])
    assert abs(sum(falls) / len(falls)) < 4 * 0.5 / 300**0.5


def test_a_short_run_is_plotted_and_rl_is_not_judged(tmp_path: Path):
    report = read([planted(tmp_path, 32, seed, peak=2.0, steps=2) for seed in range(2)])
    assert set(report.measured) == {
        "alpha of best-of-n for each doubling of the labels",
        "beta of best-of-n for each doubling of the labels",
        "fall of best-of-n's gold from its peak, 32 labels",
        "gold of best-of-n",
        "quality of best-of-n's fit",
        "gold of best-of-n for each doubling of the labels",
    }
    assert list(report.figures) == list(report.captions) == ["figure"]


def test_a_run_of_another_experiment_is_refused():
    with pytest.raises(ValueError, match="logged no gold/mean"):
        read([Run(Path("elsewhere"), {"seed": 0, "labels": 1}, [{"step": 1, "objective/kl": 0.0}], {})])
