"""A round of `trimtab iterative-sft` trains on the best samples, and on their responses only."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tests.lm import tiny

from trimtab_cli.main import main
from trimtab_cli.raft import check_share, learnable, one_round
from trimtab_lm import IterativeSFTConfig, IterativeSFTTrainer
from trimtab_lm.data.prompts import tokenize_prompts
from trimtab_lm.rewards.functions import RewardSet
from trimtab_lm.sampling.backends import TransformersRollout
from trimtab_lm.sampling.rollout import SamplingSettings


@pytest.mark.parametrize("make", [tiny.gpt2, tiny.t5])
def test_the_best_of_the_samples_of_each_prompt_is_learnt(make, tmp_path, monkeypatch):
    tokenizer = tiny.tokenizer()
    settings = {"report_to": "none", "use_cpu": True, "save_strategy": "no", "lr_scheduler_type": "constant"}
    trainer = IterativeSFTTrainer(make(), IterativeSFTConfig(str(tmp_path), **settings), processing_class=tokenizer)
    scored, learnt = SimpleNamespace(prompts=[], completions=[]), []

    def letters(prompts, completions, letter):
        scored.prompts, scored.completions = list(prompts), list(completions)
        return [float(text.count(wanted)) + len(text) / 100 for text, wanted in zip(completions, letter, strict=True)]

    def step(input_ids, labels):
        learnt.extend(zip(input_ids, labels, strict=True))
        return {}

    monkeypatch.setattr(trainer, "step", step)
    rows = Dataset.from_dict({"prompt": ["the cat", "a dog"], "letter": ["a", "o"]})
    is_encoder_decoder = trainer.is_encoder_decoder
    rows = tokenize_prompts(rows, tokenizer, is_encoder_decoder=is_encoder_decoder, needed_for="a test")
    backend = TransformersRollout(SamplingSettings(max_completion_length=8), tokenizer, batch_size=8)
    mean, best = one_round(trainer, RewardSet(letters), backend, list(rows), samples=4, number=0)

    assert scored.prompts == ["the cat"] * 4 + ["a dog"] * 4
    scores = torch.tensor(letters(scored.prompts, scored.completions, ["a"] * 4 + ["o"] * 4)).view(2, 4)
    assert mean == pytest.approx(float(scores.mean()))
    assert best == pytest.approx(float(scores.max(1).values.mean()))
    assert len(learnt) == 2
    for number, (ids, labels) in enumerate(learnt):
        answer = tokenizer.decode(labels[labels != -100], skip_special_tokens=True)
        assert answer == scored.completions[4 * number + int(scores[number].argmax())]
        assert tokenizer.decode(ids, skip_special_tokens=True).startswith(["the cat", "a dog"][number])


def test_the_tokens_of_the_completion_count():
    prompt, completion = torch.tensor([5, 6]), torch.tensor([7, 8, 9])
    (ids,), (labels,) = learnable([prompt], [completion], is_encoder_decoder=False)
    assert (ids.tolist(), labels.tolist()) == ([5, 6, 7, 8, 9], [-100, -100, 7, 8, 9])
    (ids,), (labels,) = learnable([prompt], [completion], is_encoder_decoder=True)
    assert (ids.tolist(), labels.tolist()) == ([5, 6], [7, 8, 9])


def test_the_prompts_of_a_round_divide_among_the_processes():
    """Else a process may have no row, and step refuses different numbers of rows."""
    check_share(64, 4)
    for prompts, processes in ((64, 3), (1, 2)):
        with pytest.raises(ValueError, match=f"prompts={prompts} do not divide among {processes} processes"):
            check_share(prompts, processes)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_max_steps_ends_the_rounds(place, monkeypatch, capsys):
    monkeypatch.setenv("TRIMTAB_METRICS", "metrics.jsonl")
    words = ("--rounds=9", "--prompts=4", "--samples=2", "--max_new_tokens=5", "--max_steps=3", "--save_strategy=no")
    words += ("--per_device_train_batch_size=2", "--use_cpu=True")
    assert (
        main(["iterative-sft", "--model=model", "--dataset=prompts.jsonl", "--reward=rewards.py:length", *words]) == 0
    )
    assert "The model is in runs/iterative-sft." in capsys.readouterr().out
    logs = [json.loads(line) for line in Path("metrics.jsonl").read_text().splitlines()]
    assert [log["train/round"] for log in logs if "train/round" in log] == [1, 2]
    assert logs[-1]["train/global_step"] == 3
