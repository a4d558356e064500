"""Sets up a folder as a user of the command has it: a tiny model, files of rows, and a file of rewards."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
import transformers
from tests.lm import tiny

REWARDS = """\
calls = []

def length(completions, answer, **columns):
    calls.append(answer)
    return [len(text) / 10 for text in completions]

def needs_more(completions, more, **columns):
    return [0.0 for _ in completions]

def silent(completions, **columns):
    return [None for _ in completions]

def redness(images, prompts, metadata):
    assert metadata[0] == {"hue": "warm"}
    return images[:, 0].mean((1, 2)) - images[:, 2].mean((1, 2))

def warmth(images, prompts, metadata):
    return images[:, 0].mean((1, 2)) - images[:, 2].mean((1, 2))

def brightness(images, prompts, metadata):
    return images.detach().mean((1, 2, 3))

def broken(images, prompts, metadata):
    return warmth(images, prompts, metadata) * float("nan")

class Redness:
    def __call__(self, images, prompts, metadata):
        return redness(images, prompts, metadata)

class Length:
    def __call__(self, completions, **columns):
        return [float(len(text)) for text in completions]

class Scaled:
    def __init__(self, scale, *, shift, power=1):
        pass

    def __call__(self, completions, **columns):
        return [0.0 for _ in completions]

wrong = 3
"""
WORDS = ("a dog", "the cat", "one bird", "two fish", "my cow", "a pig", "the hen", "big ox")


def write_rows(name: str, rows: list[dict[str, object]]) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Makes the folder the working directory, and removes W&B's settings; turns progress bars on again afterwards."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("WANDB_RUN_GROUP", "WANDB_JOB_TYPE"):  # which the command sets: they are gone after the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the working directory
    tiny.gpt2().save_pretrained("model")
    tiny.tokenizer().save_pretrained("model")
    write_rows("texts/train.jsonl", [{"text": f"{words} sat."} for words in WORDS])
    pairs = [{"prompt": f"{words} ", "chosen": "sat.", "rejected": "ran off."} for words in WORDS]
    write_rows("pairs/train.jsonl", pairs)
    write_rows("pairs/test.jsonl", pairs[:2])
    answers = [{"prompt": f"{words} ", "completion": "sat.", "label": i % 2 == 0} for i, words in enumerate(WORDS)]
    write_rows("answers.jsonl", answers)
    write_rows("prompts.jsonl", [{"prompt": words, "answer": words[-1]} for words in WORDS])
    Path("rewards.py").write_text(REWARDS, encoding="utf-8")
    yield tmp_path
    datasets.enable_progress_bars()
    transformers.utils.logging.enable_progress_bar()
