"""Each example is short, stands alone, runs without a network, and prints what it has learnt."""

import ast
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trimtab_lm.iterative_sft.data import Rows
from trimtab_lm.iterative_sft.run import StepRun

ROOT = Path(__file__).resolve().parents[1]
NUMBER = r"[+-]?\d+\.\d+"
LAST_WORDS = {
    "sft": rf"loss on held-out text: {NUMBER} -> {NUMBER} nats per token",
    "reward": rf"accuracy on 16 held-out pairs: {NUMBER} -> {NUMBER}",
    "dpo": rf"held-out pairs: accuracy {NUMBER}, loss {NUMBER} nats",
    "kto": rf"held-out answers: margin {NUMBER}, loss {NUMBER}",
    "grpo": rf"reward of 8 held-out prompts: {NUMBER} -> {NUMBER}",
    "ppo": rf"step 2: score {NUMBER}, KL {NUMBER} nats",
    "ppo_train": rf"step 2: score {NUMBER}, KL {NUMBER} nats",
    "iterative_sft": rf"round 2: sentiment {NUMBER}, loss {NUMBER}",
    "tool_use": rf"accuracy on 64 held-out products: {NUMBER} -> {NUMBER}",
    "alignprop": rf"update 2: reward {NUMBER}",
    "diffusion_dpo": rf"brightness {NUMBER} before, {NUMBER} after",
    "diffusion_nft": rf"reward {NUMBER} before, {NUMBER} after",
    "flow_grpo": rf"held-out captions: reward {NUMBER}, colour {NUMBER}",
    "ddpo": rf"epoch 2: \d+ updates, reward {NUMBER} kB",
}
OUTSIDE = {
    "trimtab_common",
    "trimtab_lm",
    "trimtab_diffusion",
    "torch",
    "transformers",
    "datasets",
    "peft",
    "diffusers",
}
OUTSIDE |= {"vaderSentiment"}


def imported(source: str) -> set[str]:
    """Returns the top-level names of everything that a source imports."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or ".").partition(".")[0])
    return names


def test_every_example_is_tested():
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(LAST_WORDS)


@pytest.mark.parametrize("name", LAST_WORDS)
def test_an_example_is_short_and_imports_only_packages(name: str):
    source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 80
    assert imported(source) - OUTSIDE - set(sys.stdlib_module_names) == set()


LOOPS = {
    **dict.fromkeys(("ddpo", "alignprop", "flow_grpo", "diffusion_nft"), ("num_epochs", "save_freq", "logdir")),
    "ppo": ("steps", "save_steps", "output_dir"),
    "iterative_sft": ("rounds", "save_steps", "output_dir"),
    "sft": ("max_steps", "save_steps", "output_dir"),
}
"""The settings of the examples' lengths, saves and folders."""


@pytest.mark.parametrize("name", [name for name in LAST_WORDS if name not in LOOPS])
def test_an_example_runs_and_prints_what_it_learnt(name: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--smoke"])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert re.search(LAST_WORDS[name], capsys.readouterr().out)


@pytest.mark.parametrize("name", LOOPS)
def test_an_example_prints_what_it_learnt_and_an_interrupted_one_resumes_to_the_same_weights(
    name: str, tmp_path: Path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    length, every, folder = LOOPS[name]
    resume = "resume_from_checkpoint" if "sft" in name else "resume_from"
    strategy = ["--save_strategy=steps"] if "sft" in name else []

    def run(place: str, *words: str) -> Path:
        settings = ["--smoke", f"--{length}=2", f"--{every}=1", f"--{folder}={place}", *strategy, *words]
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *settings])
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
        assert re.search(LAST_WORDS[name], capsys.readouterr().out)
        (last,) = Path(place).rglob("checkpoint-2")
        return last

    whole = run("whole")
    last = run("rest", f"--{resume}={whole.with_name('checkpoint-1')}")
    assert not last.with_name("checkpoint-1").exists()
    files = [file.relative_to(whole) for file in whole.rglob("*.safetensors")]
    assert files
    for file in files:
        torch.testing.assert_close(load_file(last / file), load_file(whole / file), rtol=0, atol=0)


def test_flow_grpo_trains_without_evaluations(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["flow_grpo.py", "--smoke", "--num_epochs=1", "--eval_freq=0"])
    runpy.run_path(str(ROOT / "examples" / "flow_grpo.py"), run_name="__main__")
    assert capsys.readouterr().out.count("held-out captions") == 1  # before training


def test_best_of_n_learns_no_end_where_a_sample_was_cut(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    learnt, begin = [], StepRun.begin_call

    def begin_call(run: StepRun, rows: Rows) -> Any:
        learnt.extend([label for label in row["labels"] if label != -100] for row in rows)
        return begin(run, rows)

    monkeypatch.setattr(StepRun, "begin_call", begin_call)
    monkeypatch.setattr(sys, "argv", ["iterative_sft.py", "--smoke", "--max_new_tokens=2"])
    runpy.run_path(str(ROOT / "examples" / "iterative_sft.py"), run_name="__main__")
    assert [len(labels) for labels in learnt] == [2] * 8
