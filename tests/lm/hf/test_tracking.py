"""Trackers in the trainers on transformers.Trainer."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb
from datasets import Dataset
from tests.lm import tiny
from transformers import TrainerCallback

from trimtab_common import tracking
from trimtab_lm.hf.tracking import Tables
from trimtab_lm.sft import SFTConfig, SFTTrainer

PROGRAM = """
import sys
from datasets import Dataset
from tests.lm import tiny
from trimtab_lm.sft import SFTConfig, SFTTrainer

args = SFTConfig(sys.argv[1], use_cpu=True, max_steps=1, save_strategy="no", report_to="wandb")
data = Dataset.from_dict({"text": ["ab"]})
SFTTrainer(tiny.gpt2(), args, train_dataset=data, processing_class=tiny.tokenizer()).train()
"""


@pytest.mark.slow
def test_wandb_without_a_key_is_offline_and_asks_nothing(tmp_path):
    """Runs in a separate process, because wandb reads the environment and its key once."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": os.getcwd(), "WANDB_SILENT": "true"}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "out")],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "offline" in ran.stderr
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1


@pytest.mark.usefixtures("offline_wandb")
def test_a_table_of_an_evaluation_before_training_waits_for_the_run(tmp_path):
    trainer = SimpleNamespace(
        is_world_process_zero=lambda: True,
        state=SimpleNamespace(global_step=0),
        args=SimpleNamespace(report_to=["wandb"]),
        callback_handler=SimpleNamespace(callbacks=[]),
    )
    tables = Tables()
    tables.add(trainer, "eval_samples", ["text"], [["early"]])
    with wandb.init(dir=str(tmp_path)) as run:
        tables.add(trainer, "samples", ["text"], [["late"]])
        last = {name: run.summary[name]["path"] for name in ("eval_samples", "samples")}
        folder = Path(run.dir)
        tables.add(trainer, "samples", ["text"], [["later"]])
        last["later"] = run.summary["samples"]["path"]
        kept = {name: json.loads((folder / path).read_text())["data"] for name, path in last.items()}
    assert kept == {"eval_samples": [[0, "early"]], "samples": [[0, "late"]], "later": [[0, "later"]]}


@pytest.mark.usefixtures("offline_wandb")
def test_a_resumed_run_keeps_its_wandb_id_and_a_new_one_does_not(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))

    def id_of_run(folder: str, *, steps: int, resume: bool = False) -> str:
        sizes = {"max_steps": steps, "save_steps": 1, "disable_tqdm": True, "lr_scheduler_type": "constant"}
        args = SFTConfig(str(tmp_path / folder), use_cpu=True, report_to="wandb", project="ours", **sizes)
        rows = Dataset.from_dict({"text": ["ab", "cd"]})
        SFTTrainer(tiny.gpt2(), args, train_dataset=rows, processing_class=tiny.tokenizer()).train(resume or None)
        run = wandb.run
        assert run is not None
        assert run.project == "ours"
        run.finish()
        return str(run.id)

    first = id_of_run("one", steps=1)
    assert id_of_run("one", steps=2, resume=True) == first
    assert id_of_run("two", steps=1) != first
    shutil.rmtree(tmp_path / "wandb")
    with pytest.warns(UserWarning, match=f"has no files of the resumed W&B run {first}"):
        assert id_of_run("one", steps=3, resume=True) == first


class Deletes(TrainerCallback):
    """Deletes the files of W&B's runs after a step, as soon as there are some."""

    def __init__(self, folder):
        self.folder = folder

    def on_step_end(self, args, state, control, **kwargs):
        while state.global_step == 2 and not (files := [*self.folder.glob("wandb/offline-run-*/*.wandb")]):
            time.sleep(0.05)
        for file in files if state.global_step == 2 else ():
            file.unlink()


@pytest.mark.usefixtures("offline_wandb")
def test_files_that_are_deleted_during_a_run_are_one_warning(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    sizes = {"max_steps": 5, "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    args = SFTConfig(str(tmp_path / "run"), use_cpu=True, report_to="wandb", **sizes)
    data = {"train_dataset": Dataset.from_dict({"text": ["ab", "cd"]}), "processing_class": tiny.tokenizer()}
    with pytest.warns(UserWarning, match="was deleted: W&B records nothing more") as caught:
        SFTTrainer(tiny.gpt2(), args, callbacks=[Deletes(tmp_path)], **data).train()
    assert len([one for one in caught if "W&B" in str(one.message)]) == 1


def test_a_tracker_without_its_package_is_refused_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: ["wandb"])
    with pytest.raises(ImportError, match="report_to='tensorboard' needs its package: pip install tensorboard"):
        SFTConfig(str(tmp_path), use_cpu=True, report_to=["wandb", "tensorboard"])
    assert SFTConfig(str(tmp_path), use_cpu=True, report_to="wandb").report_to == ["wandb"]


@pytest.mark.slow
def test_a_run_without_a_tracker_imports_no_wandb(tmp_path):
    program = PROGRAM.replace('report_to="wandb"', 'report_to="none"') + "assert 'wandb' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
