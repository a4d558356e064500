"""What a trainer on transformers.Trainer prints: one line for each log, and bars on a terminal alone."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from tests.lm import tiny
from transformers import PrinterCallback, ProgressCallback

from trimtab_lm import SFTConfig, SFTTrainer
from trimtab_lm.hf.lines import BarsCallback, LinesCallback, show_lines

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def trainer_of(folder: Path, **settings: Any) -> SFTTrainer:
    rows = Dataset.from_dict({"text": ["abc", "de", "fgh", "ij"]})
    sizes = {"max_steps": 4, "per_device_train_batch_size": 1, "logging_steps": 2, "eval_strategy": "steps"}
    config = SFTConfig(str(folder), use_cpu=True, report_to="none", save_strategy="no", **sizes | settings)
    data = {"train_dataset": rows, "eval_dataset": rows}
    return SFTTrainer(tiny.gpt2(), config, processing_class=tiny.tokenizer(), **data)


@pytest.mark.parametrize("disable_tqdm", [False, True])
def test_without_a_terminal_a_log_is_a_line_and_there_are_no_bars(disable_tqdm: bool, tmp_path: Path, capsys):
    trainer = trainer_of(tmp_path, disable_tqdm=disable_tqdm)
    capsys.readouterr()
    trainer.train()
    out, err = capsys.readouterr()
    assert "it/s" not in err
    number = r"-?[\d.e-]+"
    names = " ".join(rf"\| {name} {number}" for name in ("loss", "entropy", "grad_norm", "learning_rate", "epoch"))
    lines = out.splitlines()
    assert len(lines) == 4
    assert re.fullmatch(rf"step 2 of 4 {names} \| \d:\d\d:\d\d left", lines[0])
    assert lines[1].startswith("step 2 of 4 | eval_loss ")
    assert lines[2].startswith("step 4 of 4 | loss ")
    assert "left" not in lines[2]


def test_a_terminal_has_bars_and_lines_and_a_notebook_keeps_its_table(tmp_path: Path, monkeypatch):
    def kinds(trainer: SFTTrainer) -> set[type]:
        shown = (LinesCallback, PrinterCallback, ProgressCallback)
        return {type(one) for one in trainer.callback_handler.callbacks if isinstance(one, shown)}

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert kinds(trainer_of(tmp_path)) == {BarsCallback}
    assert kinds(trainer_of(tmp_path, disable_tqdm=True)) == {LinesCallback}
    trainer = trainer_of(tmp_path)
    trainer.pop_callback(BarsCallback)
    show_lines(trainer, trainer.watched)
    assert kinds(trainer) == set()  # as in a notebook, where transformers shows a table by another callback
