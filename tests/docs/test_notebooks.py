"""The notebooks run from top to bottom at tiny sizes, unchanged and with GPT-2's name."""

import json
import warnings
from pathlib import Path

import matplotlib
import pytest
from tests.docs.blocks import ROOT
from tests.docs.hub import small_settings

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
EACH_NOTEBOOK = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)


def cells(notebook: Path, kind: str = "code") -> list[dict]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == kind]


def run(notebook: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **replaced: str) -> dict[str, object]:
    """Runs a notebook in a copy of its place in the repository; returns the names that it defines."""
    here = folder / "examples" / "notebooks"
    here.mkdir(parents=True)
    (folder / "experiments").symlink_to(ROOT / "experiments")
    (folder / "examples" / "stories").symlink_to(ROOT / "examples" / "stories")
    monkeypatch.chdir(here)
    matplotlib.use("agg")
    names: dict[str, object] = {"__name__": "notebook"}
    with small_settings(monkeypatch), warnings.catch_warnings():
        for number, cell in enumerate(cells(notebook)):
            code = "".join(cell["source"])
            for old, new in replaced.items():
                code = code.replace(old, new)
            exec(compile(code, f"{notebook.name}[{number}]", "exec"), names)
    return names


@pytest.mark.slow
@EACH_NOTEBOOK
def test_a_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names = run(notebook, tmp_path, monkeypatch)
    assert "trainer" in names


@pytest.mark.slow
def test_the_notebook_of_ppo_takes_the_name_of_a_model(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    notebook = next(path for path in NOTEBOOKS if path.stem == "ppo_sentiment")
    names = run(notebook, tmp_path, monkeypatch, **{'"../stories"': repr(str(hub / "gpt2"))})
    assert names["model"].config.name_or_path == str(hub / "gpt2")


@EACH_NOTEBOOK
def test_a_notebook_is_stored_with_its_outputs_and_without_errors_or_paths(notebook: Path):
    outputs = [output for cell in cells(notebook) for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"] == []
    assert [cell["execution_count"] for cell in cells(notebook)] == list(range(1, len(cells(notebook)) + 1))


def test_every_notebook_is_in_the_table_of_examples():
    table = (ROOT / "examples" / "README.md").read_text()
    assert [path.name for path in NOTEBOOKS if f"(notebooks/{path.name})" not in table] == []
