"""The pages' Python code runs on tiny models with the hub's names."""

import warnings
from pathlib import Path

import pytest
from tests.docs.blocks import BLOCKS, Block
from tests.docs.hub import hidden_names, small_settings

PYTHON = [block for block in BLOCKS if block.language == "python"]
LONG = ("docs/howto/", "docs/concepts/")
PAGES = [
    pytest.param(page, marks=pytest.mark.slow if page.startswith(LONG) else ())
    for page in sorted({block.page for block in PYTHON if block.reason is None})
]


def run(block: Block, names: dict[str, object]) -> None:
    code = compile("\n" * (block.line - 1) + block.code, block.page, "exec")  # tracebacks name the page's lines
    exec(code, names)


@pytest.mark.usefixtures("offline_wandb")
@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs_from_top_to_bottom(page: str, hub: Path, tmp_path: Path, monkeypatch):
    """The blocks share a namespace, and run in a folder where the hub's names are folders with tiny models."""
    for owner in hub.iterdir():
        (tmp_path / owner.name).symlink_to(owner)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    names = {"__name__": "page", **hidden_names()}
    with small_settings(monkeypatch), warnings.catch_warnings():
        for block in PYTHON:
            if block.page == page and block.reason is None:
                run(block, names)


def test_few_blocks_are_not_run_and_each_says_why():
    left_out = {str(block): block.reason for block in BLOCKS if block.reason is not None}
    assert len(left_out) <= 8, left_out
    assert all(len(str(reason).split()) >= 3 for reason in left_out.values())


def test_every_block_says_what_language_it_is():
    assert [str(block) for block in BLOCKS if block.language not in ("python", "bash", "text", "yaml", "json")] == []


def test_a_block_that_fails_is_named_by_page_and_line():
    broken = Block("docs/page.md", 40, "python", "x = 1\nraise KeyError(x)\n", None)
    with pytest.raises(KeyError) as failure:
        run(broken, {})
    assert (failure.traceback[-1].path, failure.traceback[-1].lineno + 1) == ("docs/page.md", 41)
