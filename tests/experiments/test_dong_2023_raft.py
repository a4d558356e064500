"""RAFT: the files of a two-round run, PPO's measures, and what the report reads."""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from tests.lm import tiny

from experiments import sentiment_ppo
from experiments.claims import Verdict, judge
from experiments.dong_2023_raft import ppo, train
from experiments.dong_2023_raft.measures import distinct, nats_per_token
from experiments.dong_2023_raft.report import read
from experiments.run_folders import Run, finished_runs

OPENINGS = ["the cat", "a dog", "he went", "so it", "one day", "at the"]


def letters(completions: list[str], **_: object) -> list[float]:
    return [float(text.count("e")) for text in completions]


@pytest.fixture(autouse=True)
def _figures_are_closed() -> Iterator[None]:
    yield
    plt.close("all")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Writes a tiny Llama and its tokenizer; replaces the openings and the reward by ones that suit its characters."""
    tiny.llama(max_position_embeddings=256).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    for module in (train, ppo, sentiment_ppo):
        monkeypatch.setattr(module, "openings", lambda split: OPENINGS)
    for module in (train, ppo):
        monkeypatch.setattr(module, "sentiment", letters)
    return str(tmp_path / "model")


SIZES = {"max_new_tokens": 6, "eval_prompts": 2, "samples": 1}


def test_each_round_is_evaluated(model: str, tmp_path: Path):
    sizes = {"rounds": 2, "prompts": 2, "k": 4, **SIZES}
    quiet = {"report_to": "none", "use_cpu": True, "logging_steps": 1}
    folders = {"output_dir": str(tmp_path / "run"), "model": model}
    train.main(*train.settings([], learning_rate=1e-2, **folders, **sizes, **quiet))
    (run,) = finished_runs(tmp_path)
    rounds, rewards = run.curve("round", "eval_reward")
    assert rounds == [0, 1, 2]
    assert (rewards[0], rewards[-1]) == (run.summary["reward_before"], run.summary["reward"])
    assert fmean(run.per_prompt["reward"]) == rewards[-1]
    assert run.curve("round", "reward_of_best")[0] == [1, 2]
    page = read([run])
    assert set(page.measured) == {
        f"{name}, K = 4, 2 prompts" for name in ("reward before", "reward", "nats", "distinct-2")
    }
    assert list(page.samples) == ["run", "query", "before", "after", "reward"]


def test_ppo_is_measured_on_the_answers_of_its_last_evaluation(model: str, tmp_path: Path):
    sizes = {"steps": 2, "batch_size": 4, "mini_batch_size": 2, "learning_rate": 1e-2, **SIZES}
    ppo.main(*ppo.settings([], log_with=None, output_dir=str(tmp_path / "run"), model=model, **sizes))
    (run,) = finished_runs(tmp_path)
    samples = json.loads((run.folder / "samples.json").read_text())
    assert letters(samples["after"]) == run.per_prompt["reward"]
    assert run.summary["distinct_2"] == distinct(samples["after"], 2)
    assert len(run.per_prompt["nats_per_token"]) == 2
    assert set(read([run]).measured) == {f"{name}, PPO" for name in ("reward before", "reward", "nats", "distinct-2")}


# The measures ----------------------------------------------------------------------------------------------------


def test_distinct_counts_bigrams_of_all_texts_together():
    assert distinct(["a b c", "a b d", "A  b"], 2) == 3 / 5
    assert distinct(["a b c"], 1) == 1.0
    assert distinct(["a"], 2) == 0.0


def test_nats_per_token_are_those_of_the_reference_alone():
    """A model with equal logits everywhere gives each token log V, whatever the prompt."""
    model, tokenizer = tiny.llama(), tiny.tokenizer()
    torch.nn.init.zeros_(model.lm_head.weight)
    rows = [torch.tensor([5, 6, 7]), torch.tensor([8])]
    nats = nats_per_token(model, tokenizer, ["the cat", "a"], rows)
    assert nats == pytest.approx([torch.tensor(float(model.config.vocab_size)).log().item()] * 2)


# The report ------------------------------------------------------------------------------------------------------

MEASURES = {"reward": 0.5, "nats": 2.0, "distinct": 0.5}


def run_of(folder: Path, seed: int, *, k: int = 0, prompts: int = 0, **measures: float) -> Run:
    """Returns a run of one RAFT round, or for k = 0 of one PPO step on eight samples; its first reward is 0.2."""
    values = {**MEASURES, **measures}
    noise = np.random.default_rng([seed, k, prompts]).normal(scale=0.01, size=20).tolist()
    per_prompt = {
        "reward_before": [0.2] * 20,
        "reward": [values["reward"] + x for x in noise],
        "nats_per_token": [values["nats"] + x for x in noise],
    }
    summary = {"reward": values["reward"], "distinct_2": values["distinct"] + noise[0]}
    (folder / "samples.json").write_text(json.dumps({"query": ["a"], "before": ["b"], "after": ["c"]}))
    if k:
        config = {"seed": seed, "k": k, "prompts": prompts, "rounds": 1}
        history = [{"step": i, "round": i, "eval_reward": 0.2, "reward": 0.2} for i in (0, 1)]
    else:
        config = {"seed": seed, "init_kl_coef": 0.1, "steps": 1, "batch_size": 8}
        history = [{"step": 1, "ppo/mean_scores": 0.3}]
    return Run(folder, config, history, summary, per_prompt)


def verdicts_of(runs: list[Run]) -> dict[str, Verdict]:
    page = read(runs)
    return {verdict.claim.text: verdict for verdict in judge(page.claims, page.measured)}


def test_planted_differences_are_found_at_equal_rounds_and_at_equal_samples(tmp_path: Path):
    runs = []
    for seed in range(10, 18):
        runs += [run_of(tmp_path, seed, k=1, prompts=4, reward=0.2), run_of(tmp_path, seed, k=2, prompts=4)]
        runs += [run_of(tmp_path, seed, k=4, prompts=4, reward=0.8)]
        runs += [run_of(tmp_path, seed, k=4, prompts=2, reward=0.3)]
        runs += [run_of(tmp_path, seed, reward=0.7, nats=2.5, distinct=0.7)]
    assert {text: verdict.outcome for text, verdict in verdicts_of(runs).items()} == {
        "K = 1, 4 prompts: without selection the reward of held-out openings changes little": "holds",
        "K = 2, 4 prompts: more reward than K = 1, 4 prompts, at equal rounds": "reproduced",
        "K = 4, 4 prompts: more reward than K = 2, 4 prompts, at equal rounds": "reproduced",
        "K = 2, 4 prompts: the reward of held-out openings rises": "reproduced",
        "K = 2, 4 prompts: more reward than PPO, at equal numbers of samples": "does not carry over",
        "K = 2, 4 prompts: a lower perplexity than PPO, at equal numbers of samples": "reproduced",
        "K = 2, 4 prompts: more diverse than PPO, at equal numbers of samples": "does not carry over",
    }


def test_ppo_of_another_number_of_samples_is_not_compared(tmp_path: Path):
    assert not verdicts_of([run_of(tmp_path, 10, k=4, prompts=4), run_of(tmp_path, 10)])


def test_two_runs_of_one_setting_and_seed_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="have the seed 10"):
        read([run_of(tmp_path, 10, k=4, prompts=4), run_of(tmp_path, 10, k=4, prompts=4)])
