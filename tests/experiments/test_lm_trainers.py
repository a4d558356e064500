"""The experiments with one trainer: a step or two on tiny models, and the parts that choose the training data."""

import json
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest
import torch
from datasets import Dataset
from tests.lm import tiny
from transformers import AutoTokenizer

from experiments.dong_2023_raft import train as raft
from experiments.rafailov_2023_dpo_frontier import train as dpo
from experiments.run_folders import read_history
from experiments.shao_2024_grpo import train as grpo
from experiments.stiennon_2020_summarize import reward, sft

PROGRAMS = [sft, reward, raft, dpo, grpo]


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Writes a tiny Llama and its tokenizer, and returns their folder."""
    folder = tmp_path / "model"
    tiny.llama(max_position_embeddings=256).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def quiet(tmp_path: Path, **others: Any) -> dict[str, Any]:
    batch = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    return (
        {"output_dir": str(tmp_path / "run"), "report_to": "none", "logging_steps": 1, "use_cpu": True} | batch | others
    )


def left_behind(tmp_path: Path) -> list[dict[str, Any]]:
    """Returns a run's history, and checks that the other files exist."""
    folder = tmp_path / "run"
    assert json.loads((folder / "config.json").read_text())["model"] == str(tmp_path / "model")
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    return read_history(folder)


def logged(history: list[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in history if name in row]


@pytest.mark.parametrize("script", PROGRAMS, ids=lambda script: script.__name__)
def test_help_is_shown_and_the_defaults_are_valid(script: ModuleType, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        script.settings(["--help"])
    assert "--learning_rate" in capsys.readouterr().out
    run, args = script.settings(["--report_to=none", "--model=x"])
    assert run.model == "x"
    assert args.report_to == []


def test_sft_learns_speeches(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    addresses = [{"president": name, "text": "we are here. it is so. go on now. be well."} for name in ("a", "b", "c")]
    monkeypatch.setattr(sft, "state_of_the_union", lambda: addresses)
    run = sft.RunConfig(model=model, held_out=("c",), words=6, samples=1, max_new_tokens=4)
    sft.main(run, sft.settings([], **quiet(tmp_path, max_steps=2, max_length=64))[1])
    history = left_behind(tmp_path)
    assert [row["step"] for row in history if "loss" in row] == [1, 2]
    assert len(logged(history, "eval_loss")) == 2
    shown = capsys.readouterr().out
    assert "before training" in shown
    assert "held-out loss" in shown


def test_a_document_is_whole_sentences_of_few_words():
    text = "One two three. Four five! Six seven eight nine ten eleven. Twelve?  Thirteen."
    documents = list(sft.documents(text, words=5))
    assert documents == ["One two three. Four five!", "Six seven eight nine ten eleven.", "Twelve? Thirteen."]
    assert list(sft.documents(" ", words=5)) == []


def test_held_out_presidents_are_not_learnt_from():
    addresses = [{"president": name, "text": f"{name} spoke."} for name in ("Ann", "Bob", "Cid")]
    train, test = sft.speeches(addresses, sft.RunConfig(held_out=("Bob",)))
    assert train["text"] == ["Ann spoke.", "Cid spoke."]
    assert test["text"] == ["Bob spoke."]


def test_reward_model_learns_reviews(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    texts = [f"{'good' if i % 2 else 'bad'} film {'abcdefghijklmnopqrstuvwxyz'[i]}" for i in range(26)]
    reviews = Dataset.from_dict({"text": texts, "label": [i % 2 for i in range(26)]})
    monkeypatch.setattr(reward, "imdb_reviews", lambda: reviews)
    reward.main(reward.RunConfig(model=model), reward.settings([], **quiet(tmp_path, max_steps=2))[1])
    history = left_behind(tmp_path)
    assert len(logged(history, "loss")) == 2
    assert history[-1]["eval_accuracy"] == logged(history, "eval_accuracy")[-2]
    assert "accuracy on 2 other pairs" in capsys.readouterr().out


def test_the_review_that_likes_the_film_is_chosen_and_its_end_is_read():
    reviews = [{"text": "it was dull", "label": 0}, {"text": "it was so lovely", "label": 1}, {"text": "x", "label": 0}]
    assert reward.review_pairs(reviews, words=2).to_list() == [{"chosen": "so lovely", "rejected": "was dull"}]


def openings(split: str) -> list[str]:
    return ["the cat", "a dog", "he went", "so it", "one day", "at the"]


def test_raft_learns_the_best_of_its_samples(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    learnt: list[dict[str, Any]] = []
    step = raft.IterativeSFTTrainer.step

    def spied(self: Any, input_ids: Any, *, labels: Any) -> Any:
        learnt.append({"input_ids": input_ids, "labels": labels})
        return step(self, input_ids, labels=labels)

    monkeypatch.setattr(raft.IterativeSFTTrainer, "step", spied)
    monkeypatch.setattr(raft, "openings", openings)
    monkeypatch.setattr(raft, "sentiment", lambda completions, **_: [len(set(text)) for text in completions])
    run = raft.RunConfig(model=model, rounds=2, prompts=2, k=8, max_new_tokens=6, eval_prompts=2, samples=1)
    raft.main(run, raft.settings([], **quiet(tmp_path, lr_scheduler_type="constant"))[1])
    history = left_behind(tmp_path)
    assert all(
        best > mean for best, mean in zip(*(logged(history, n) for n in ("reward_of_best", "reward")), strict=True)
    )
    best = logged(history, "reward_of_best")
    tokenizer = AutoTokenizer.from_pretrained(model)
    for rows, expected in zip(learnt, best, strict=True):
        answers = [labels[labels >= 0] for labels in rows["labels"]]
        texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
        assert fmean(len(set(text)) for text in texts) == expected
        assert all(
            torch.equal(ids[labels >= 0], labels[labels >= 0])
            for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True)
        )
    shown = capsys.readouterr().out
    assert "round 2 of 2" in shown
    assert "reward of 2 other prompts" in shown


def test_grpo_answers_sums(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = grpo.RunConfig(model=model, largest=6, eval_prompts=2, majority_of=2, samples=1)
    grpo.main(run, grpo.settings([], **quiet(tmp_path, max_steps=2, num_generations=2))[1])
    history = left_behind(tmp_path)
    assert [row["step"] for row in history if "loss" in row] == [1, 2]
    assert len(logged(history, "eval_right")) == len(logged(history, "eval_right_before")) == 1
    assert "right of the answers to 2 other sums" in capsys.readouterr().out


def test_an_answer_is_right_if_its_first_line_is_the_number():
    completions = [" 12", " 12\n3 +", " 12 and", " 1", "", " 13"]
    assert grpo.right(completions=completions, answer=[12] * 6) == [1, 1, 0, 0, 0, 0]


def test_the_sums_that_are_asked_at_the_end_are_in_no_prompt_of_training():
    data = grpo.sums(grpo.RunConfig(largest=15, eval_prompts=50), seed=0)
    asked = {prompt.splitlines()[-1] for prompt in data["test"]["prompt"]}
    assert len(asked) == len(data["test"]) == 50
    for row in data["train"]:
        assert not asked & {line.partition("=")[0] + "=" for line in row["prompt"].splitlines()}
        assert eval(row["prompt"].splitlines()[-1].strip("=")) == row["answer"]
