"""The pages' shell commands name files, targets, extras and flags that exist."""

import contextlib
import functools
import io
import os
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
from accelerate.commands.launch import launch_command_parser
from tests.docs.blocks import BLOCKS, ROOT, Block
from wandb.cli.cli import cli as wandb_cli

from trimtab_cli.main import COMMANDS, TRAINING

SHELL = [block for block in BLOCKS if block.language == "bash" and block.reason is None]
EACH_BLOCK = pytest.mark.parametrize("block", SHELL, ids=str)
PLACEHOLDERS = {"script.py", "train.py", "FOLDER", "FILE", "my_script.py"}
SHELL_WORDS = {"cd", "export", "git", "uv", "tensorboard", "source", "optuna-dashboard"}


class Wrong(AssertionError):
    """A page's command would not run."""


def commands(block: Block) -> Iterator[list[str]]:
    """Yields the words of each command, without comments, leading variables and redirections."""
    for line in block.code.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|\|\|", line):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words:
                yield words


def check(words: list[str]) -> None:
    """Raises Wrong if a command names something that does not exist."""
    program, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    checks = {"make": check_make, "pip": check_pip, "accelerate": check_accelerate, "wandb": check_wandb}
    if program == "uv" and rest[:1] == ["pip"]:
        check_pip(rest[1:])
    elif program in checks:
        checks[program](rest)
    elif program in ("python", "torchrun"):
        check_python(rest)
    elif program == "trimtab":
        check_python(["-m", "trimtab_lm", *rest])
    elif program not in SHELL_WORDS:
        raise Wrong(f"{program}: not a command for the pages")


def check_make(words: list[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    if unknown := {word for word in words if "=" not in word} - targets:
        raise Wrong(f"the Makefile has no target {unknown}")


def check_pip(words: list[str]) -> None:
    """Checks that folders exist, and that our extras and dependency groups do."""
    projects = {path.parent.name: tomllib.loads(path.read_text()) for path in ROOT.glob("packages/*/pyproject.toml")}
    for before, word in zip([None, *words], words, strict=False):
        path, _, extras = word.rstrip("]").partition("[")
        name = Path(path).name.removeprefix("trimtab-")
        if before in ("-e", "-c", "-r") and not (ROOT / path).exists():
            raise Wrong(f"there is no {path}")
        if name in projects:
            known = projects[name]["project"].get("optional-dependencies", {})
            if unknown := set(filter(None, extras.split(","))) - set(known):
                raise Wrong(f"{path} has no extra {unknown}")
        if (
            before == "--group"
            and word not in tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
        ):
            raise Wrong(f"there is no dependency group {word}")


def check_accelerate(words: list[str]) -> None:
    if words[0] != "launch":
        raise Wrong(f"accelerate {words[0]}: not checked")
    options, script = launch_command_parser().parse_known_args(words[1:])
    if options.config_file and not (ROOT / options.config_file).exists():
        raise Wrong(f"there is no {options.config_file}")
    target = ["-m", options.training_script] if options.module else [options.training_script]
    check_python([*target, *options.training_script_args, *script])


def check_wandb(words: list[str]) -> None:
    if words[0] not in wandb_cli.commands:
        raise Wrong(f"wandb has no command {words[0]}")


def check_python(words: list[str]) -> None:
    if words[0] == "-m":
        if find_spec(words[1]) is None:
            raise Wrong(f"there is no module {words[1]}")
        if not words[1].startswith(("trimtab", "experiments", "tools", "tests")):
            return
        program, flags = ("-m", words[1]), words[2:]
        if words[1] == "trimtab_lm":  # its first argument is a subcommand
            if flags[0] not in COMMANDS:
                raise Wrong(f"trimtab has no subcommand {flags[0]}")
            program, flags = (*program, flags[0]), flags[1:]
    elif Path(words[0]).name in PLACEHOLDERS:
        return
    elif not (ROOT / words[0]).exists():
        raise Wrong(f"there is no {words[0]}")
    else:
        program, flags = (words[0],), words[1:]
    check_flags(program, flags)


def check_flags(program: tuple[str, ...], words: list[str]) -> None:
    """Checks that a program's help has the flags, and that the files passed to it exist."""
    flags = {word.partition("=")[0] for word in words if word.startswith("--")} - {"--help", "--help-all", "--config"}
    if flags:
        text = help_of(program)
        if unknown := sorted(flag for flag in flags if flag not in text and flag.replace("-", "_") not in text):
            raise Wrong(f"{' '.join(program)} has no {', '.join(unknown)}")
    for word in words:
        if re.match(r"(configs|experiments|examples|tools|docs)/", word) and not (ROOT / word).exists():
            raise Wrong(f"there is no {word}")


@functools.cache
def help_of(program: tuple[str, ...]) -> str:
    """Returns what a program of the repository prints with --help."""
    is_module, printed = program[0] == "-m", io.StringIO()
    name = program[1] if is_module else program[0]
    words = list(program[2 if is_module else 1 :])
    arguments = [name, *words, "--help-all" if words[:1] and words[0] in TRAINING else "--help"]
    run, options = (runpy.run_module, {"alter_sys": True}) if is_module else (runpy.run_path, {})
    with patch.object(sys, "argv", arguments), contextlib.redirect_stdout(printed), pytest.raises(SystemExit):
        run(name, run_name="__main__", **options)
    return printed.getvalue()


@EACH_BLOCK
def test_the_commands_of_a_page_name_what_exists(block: Block, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(os.environ, "COLUMNS", "200")
    for words in commands(block):
        check(words)


@pytest.mark.parametrize(
    "line",
    [
        "make everything",
        "pip install -e packages/vision",
        'pip install "trimtab-lm[speed]"',
        "pip install --group nothing",
        "python examples/nothing.py",
        "python examples/ppo.py --no_such_setting 1",
        "python -m trimtab_lm.nothing",
        "accelerate launch --config_file configs/accelerate/nothing.yaml train.py",
        "wandb nothing",
        "trimtab nothing",
        "trimtab dpo --no_such_setting 1",
        "npm install",
    ],
)
def test_a_command_that_names_what_does_not_exist_is_refused(line: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises((Wrong, ModuleNotFoundError)):
        check(shlex.split(line))


def test_a_command_over_several_lines_is_one():
    block = Block("page", 1, "bash", "A=1 make test \\\n  ARGS=x && make check  # both\n", None)
    assert list(commands(block)) == [["make", "test", "ARGS=x"], ["make", "check"]]
