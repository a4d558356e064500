"""The command itself: its subcommands, their help, its imports, and its messages about mistakes."""

import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from tests.processes import environment
from transformers import TrainingArguments

from trimtab_cli.main import COMMANDS, TRAINING, main
from trimtab_common.config import Computed
from trimtab_lm import DPOConfig, PPOConfig

ROOT = Path(__file__).resolve().parents[2]


def help_of(capsys, *words):
    """Returns what a subcommand prints as help, and the names of the flags in it."""
    try:
        status = main(words)
    except SystemExit as end:
        status = end.code
    assert status == 0
    text = capsys.readouterr().out
    return text, [line.split()[0].removeprefix("--") for line in text.splitlines() if line.startswith("  --")]


def test_the_help_names_every_subcommand(capsys):
    text, _ = help_of(capsys, "--help")
    assert [line.split("  ")[1] for line in text.splitlines() if line.startswith("  ")] == list(COMMANDS)
    assert help_of(capsys)[0] == text


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in TRAINING])
def test_every_other_subcommand_explains_itself(name, capsys):
    assert f"usage: trimtab {name}" in help_of(capsys, *name.split(), "--help")[0]


@pytest.mark.parametrize("name", TRAINING)
def test_the_help_of_a_training_begins_with_an_example_and_what_it_needs(name, capsys):
    text, flags = help_of(capsys, name, "--help")
    assert text.startswith(f"usage: trimtab {name} [--config FILE.yaml]")
    assert f"\n  trimtab {name} --model " in text
    assert flags[:2] == ["model", "dataset"]
    assert len(text.splitlines()) < 200
    assert max(map(len, text.splitlines())) <= 120


def test_the_everyday_settings_of_a_subcommand_have_an_effect_there(capsys):
    without_effect = {"--num_train_epochs", "--max_steps", "--eval_strategy"}
    assert all(name in help_of(capsys, "dpo", "--help")[0] for name in without_effect)
    text, _ = help_of(capsys, "iterative-sft", "--help")
    assert "--lr_scheduler_type" in text
    assert not any(name in text for name in without_effect)


def test_inherited_settings_are_behind_help_all(capsys):
    inherited = {field.name for field in fields(TrainingArguments) if field.init}
    ours = {field.name for field in fields(DPOConfig)} - inherited
    _, shown = help_of(capsys, "dpo", "--help")
    _, everything = help_of(capsys, "dpo", "--help-all")
    assert {"beta", "loss_type", "output_dir"} <= set(shown)
    assert len(inherited & set(shown)) <= 7  # the subcommand sets these
    assert ours | inherited <= set(everything)


def test_computed_settings_are_no_flags(capsys):
    computed = {field.name for field in fields(PPOConfig) if isinstance(field.metadata["help"], Computed)}
    assert "global_batch_size" in computed
    assert computed.isdisjoint(help_of(capsys, "ppo", "--help-all")[1])


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["dpoo"], "'dpoo' is no subcommand. Did you mean dpo?"),
        (["zzzzzzzz"], "Subcommands are sft, reward, dpo"),
        (["--modle=x"], "'--modle=x' is no subcommand."),
    ],
)
def test_an_unknown_subcommand_is_one_line_and_status_2(words, error, capsys):
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trimtab: error: ")
    assert error in line


def test_a_subcommand_says_which_package_it_needs(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "trimtab_diffusion", None)  # makes the import fail, as for a missing package
    assert main(["ddpo", "--model=x"]) == 2
    assert "pip install trimtab-diffusion" in capsys.readouterr().err
    assert "(missing: pip install trimtab-diffusion)" in help_of(capsys, "--help")[0]


@pytest.mark.parametrize("words", [["--help"], ["sweep", "--help"], ["dpoo"]])
def test_help_comes_without_torch(words):
    code = f"import sys; from trimtab_cli.main import main\ntry: main({words})\nexcept SystemExit: pass\n"
    code += "print([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_version_is_that_of_the_distribution(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("trimtab 0.")


def test_the_launchers_module_says_what_to_install_where_the_command_is_missing(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "trimtab_cli", None)
    with pytest.raises(SystemExit, match="pip install trimtab-cli"):
        runpy.run_module("trimtab_lm", run_name="__main__")
