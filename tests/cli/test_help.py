"""The pages of --help: what the subcommands' configurations say, at the cost of reading a file.

After an intended change of a setting, `python -m tests.cli.test_help` writes the pages again.
"""

import io
import subprocess
import sys
from contextlib import redirect_stdout
from importlib import import_module

import pytest
import torch
from tests.processes import environment

from trimtab_cli.main import COMMANDS, PAGES, page_of

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


if __name__ == "__main__":
    for each in COMMANDS:
        with pytest.MonkeyPatch.context() as patch:
            page_of(each).write_text(written(each, patch), encoding="utf-8")
