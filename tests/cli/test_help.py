"""The pages of --help and the record of settings: what the configurations say, at the cost of reading a file.

After an intended change of a setting, `python -m tests.cli.test_help` writes both again.
"""

import io
import json
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
import torch
from tests.processes import environment
from transformers import TrainingArguments

from trimtab_cli.main import COMMANDS, PAGES, page_of
from trimtab_cli.mistakes import INHERITED, RECORD, mistake_in, training_arguments
from trimtab_common.config import Computed
from trimtab_common.config.fields import short_name

HEAVY = {"torch", "transformers", "datasets", "peft", "accelerate", "diffusers", "numpy", "pydantic", "wandb"}


def written(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the subcommand's own help, on a machine with an accelerator, without a terminal, outside a sweep."""
    command = COMMANDS[name]
    module = import_module(command.module)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.delenv("WANDB_SWEEP_ID", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "argv", ["trimtab"])  # the default name of a run is the program's
    with redirect_stdout(io.StringIO()) as text, pytest.raises(SystemExit):
        getattr(module, command.function)(["--help"])
    return text.getvalue()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_is_what_the_configurations_say(name: str, monkeypatch: pytest.MonkeyPatch):
    page = page_of(name).read_text(encoding="utf-8")
    assert page == written(name, monkeypatch), "python -m tests.cli.test_help writes it again"


def test_every_page_belongs_to_a_subcommand():
    assert set(PAGES.iterdir()) == set(map(page_of, COMMANDS))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_imports_no_library(name: str):
    words = [*name.split(), "--help"]
    code = f"import sys; from trimtab_cli.main import main\ntry: main({words})\nexcept SystemExit: pass\n"
    code += "print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    modules = done.stdout.splitlines()[-1].split()
    assert HEAVY.isdisjoint(modules)
    assert len(modules) < 200


def record(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Returns the settings of each subcommand that reads them from dataclasses."""
    calls: list[tuple[tuple[type, ...], tuple[str, ...]]] = []

    def remember(*kinds: type, without: tuple[str, ...] = (), **_: object) -> None:
        calls.append((kinds, without))
        raise SystemExit

    for module in ("subcommands", "memory", "diffusion_memory"):
        monkeypatch.setattr(f"trimtab_cli.{module}.parse_config", remember)
    inherited = {field.name for field in fields(TrainingArguments)}
    found: dict[str, object] = {INHERITED: sorted(inherited)}
    for name, command in COMMANDS.items():
        calls.clear()
        with redirect_stdout(io.StringIO()), suppress(SystemExit):
            getattr(import_module(command.module), command.function)(["--help"])
        if calls:
            ((kinds, without),) = calls
            every = [(short_name(kind), field) for kind in kinds for field in fields(kind)]
            computed = {one.name for _, one in every if not one.init or isinstance(one.metadata.get("help"), Computed)}
            named: dict[str, list[str]] = {short_name(kind): [] for kind in kinds}
            for short, field in every:
                is_inherited = issubclass(kinds[-1], TrainingArguments) and field.name in inherited
                if not (is_inherited or field.name in computed or field.name in without):
                    named[short].append(field.name)
            trainer = short_name(kinds[-1]) if issubclass(kinds[-1], TrainingArguments) else None
            found[name] = {"settings": named, "computed": sorted(computed), "inherits": trainer}
    return found


def test_the_record_is_what_the_configurations_have(monkeypatch: pytest.MonkeyPatch):
    assert json.loads(RECORD.read_text()) == record(monkeypatch), "python -m tests.cli.test_help writes it again"


def test_the_settings_of_transformers_are_read_from_its_source():
    assert set(training_arguments()) == {field.name for field in fields(TrainingArguments)}


MISTAKES = [
    ("sft", "--lerning_rate=1", "--lerning_rate is not a setting. Did you mean learning_rate?"),
    ("sft", "--sft.max_lenght=1", "--sft.max_lenght is not a setting. Did you mean sft.max_length?"),
    ("ppo", "--model_name=x", "--model_name is not a setting. Did you mean model?"),
    ("ppo", "--bf16", "--bf16 is not a setting. Did you mean accelerator_kwargs.mixed_precision?"),
    ("ddpo", "--bf16", "--bf16 is not a setting. Did you mean mixed_precision?"),
    ("sft", "--model_revision=x", "--model_revision is not a setting. Did you mean model_init_kwargs.revision?"),
    (
        "dpo",
        "--attn_implementation=x",
        "--attn_implementation is not a setting. Did you mean model_init_kwargs.attn_implementation?",
    ),
    (
        "sft",
        "--lora_dropout=0.1",
        "--lora_dropout is not a setting of the command line. Train in Python, with peft_config=LoraConfig(...).",
    ),
    (
        "ddpo",
        "--attn_implementation=x",
        "--attn_implementation is not a setting of the command line. Train in Python, "
        "with a model that from_pretrained loads with it.",
    ),
    ("ddpo", "--zzzzzz", "--zzzzzz is not a setting. --help lists the names."),
    ("memory", "--modle=x", "--modle is not a setting. Did you mean model?"),
    ("dpo", "stray", "'stray' belongs to no flag. Write --name=value; --help lists the names."),
    ("dpo", "--config=missing.yaml", "missing.yaml: No such file or directory."),
]


@pytest.mark.parametrize(("name", "word", "line"), MISTAKES)
def test_a_mistyped_name_is_answered_as_the_parser_answers_it(
    name: str, word: str, line: str, capsys: pytest.CaptureFixture[str]
):
    assert mistake_in(name, [word]) == line
    command = COMMANDS[name]
    with pytest.raises(SystemExit, match="2"):
        getattr(import_module(command.module), command.function)([word])
    assert capsys.readouterr().err == f"trimtab {name}: error: {line}\n"


def test_names_of_files_are_looked_at_and_known_ones_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    known = "model: .\nlearning_rate: 1\ndpo: {beta: 1}\nrun.split: test\ndpo.model_init_kwargs.revision: a\n"
    Path("dpo.yaml").write_text(known)
    flags = ("--config=dpo.yaml", "--dpo.learning-rate=1", "--model-init-kwargs.some-Key=1", "--dpo={'beta': 1}")
    assert mistake_in("dpo", flags) is None
    assert mistake_in("ppo", ["--global_batch_size=4"]) is None  # which the parser refuses as computed
    assert mistake_in("chat", ["--nonsense"]) is None
    Path("dpo.yaml").write_text(known + "use_peft: true\n")
    assert mistake_in("dpo", flags) == "dpo.yaml: use_peft is not a setting. Did you mean lora_r?"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--lerning_rate", "1"], "--lerning_rate is not a setting. Did you mean learning_rate?"),
        (["--dataset=missing.jsonl"], "There is no file or folder missing.jsonl."),
        (
            ["--model=nobody/nothing"],
            "There is no folder nobody/nothing, and the cache has no such model; HF_HUB_OFFLINE is set. Unset it.",
        ),
        (["--model=.", "--push_to_hub"], "push_to_hub=True needs the hub; HF_HUB_OFFLINE is set. Unset it."),
    ],
)
def test_a_mistake_is_answered_before_a_library_is_imported(words: list[str], line: str):
    code = f"import sys; from trimtab_cli.main import main\nprint(main(['sft', *{words}]), *sys.modules)"
    offline = environment() | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True, check=True)
    status, *modules = done.stdout.split()
    assert status == "2"
    assert done.stderr == f"trimtab sft: error: {line}\n"
    assert (HEAVY - {"pydantic"}).isdisjoint(modules)


if __name__ == "__main__":
    for each in COMMANDS:
        with pytest.MonkeyPatch.context() as patch:
            page_of(each).write_text(written(each, patch), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record(patch).items()]
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
