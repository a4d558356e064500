"""Rules for all seven trainers: resume from the newest whole checkpoint, keep the settings, end a finished run."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tools.chaos import works
from torch.optim.optimizer import register_optimizer_step_post_hook

from trimtab_common.sealing import CheckpointError, checkpoints, is_complete, latest_checkpoint

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
TRAINERS = ("ppo", "ddpo", "sft", "dpo", "reward", "grpo", "iterative_sft")
OTHERS: dict[str, tuple[str, Any]] = {"ppo": ("vf_coef", 0.5), "ddpo": ("sample_eta", 0.5)}
LAST = f"checkpoint-{works.STEPS}"


@pytest.fixture(scope="module", params=TRAINERS)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Returns a trainer's name, and the folder of its finished run."""
    folder = tmp_path_factory.mktemp(request.param)
    works.WORKS[request.param](folder, "none")
    return request.param, folder


@pytest.fixture
def run(finished: tuple[str, Path], tmp_path: Path) -> tuple[str, Path, Callable[..., Any]]:
    """Copies the finished run into a folder for the test; also returns a function that continues it."""
    name, folder = finished
    shutil.copytree(folder, tmp_path / "run")
    return name, tmp_path / "run", works.WORKS[name]


@pytest.fixture
def updates() -> Iterator[list[int]]:
    """Yields a list that grows with each optimizer step."""
    taken: list[int] = []
    handle = register_optimizer_step_post_hook(lambda *_: taken.append(1))
    yield taken
    handle.remove()


def test_a_finished_run_that_is_resumed_trains_nothing(run, updates):
    _, folder, go_on = run
    before = (folder / "checkpoints" / LAST / "manifest.json").read_bytes()
    go_on(folder, "none")
    assert updates == []
    assert (folder / "checkpoints" / LAST / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("damage", ["truncated", "unsealed", "another format"])
def test_the_newest_whole_checkpoint_is_resumed(run, updates, damage):
    name, folder, go_on = run
    newest = folder / "checkpoints" / LAST
    if damage == "truncated":
        file = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "unsealed":
        (newest / "manifest.json").unlink()
    else:
        text = (newest / "manifest.json").read_text()
        (newest / "manifest.json").write_text(text.replace('"format": 1', '"format": 77'))
    steps_left = works.SAVE_EVERY * (8 if name == "ppo" else 2 if name == "ddpo" else 1)
    reason = {"truncated": "bytes", "unsealed": "cut short", "another format": "format 77"}[damage]
    with pytest.warns(UserWarning, match=f"Passing over .*{LAST}: .*{reason}"):
        go_on(folder, "none")
    assert len(updates) == steps_left
    assert latest_checkpoint(folder / "checkpoints") == newest
    assert all(is_complete(path) for path in checkpoints(folder / "checkpoints").values())


def test_a_resume_with_another_setting_lists_it(run):
    name, folder, go_on = run
    setting, value = OTHERS.get(name, ("weight_decay", 0.5))
    with pytest.raises(CheckpointError, match=rf"{setting} was .*, is {value}"):
        go_on(folder, "none", **{setting: value})


def test_a_new_run_is_refused_an_old_folder(run, monkeypatch):
    name, folder, begin = run
    monkeypatch.setattr(works, "latest_checkpoint", lambda root: None)  # keeps the programs from resuming

    def begin_anew() -> None:
        if name == "ppo":
            works.ppo_trainer(folder, "none").train(works.scored)
        else:
            begin(folder, "none", **({"resume_from": ""} if name == "ddpo" else {}))

    with pytest.raises(CheckpointError, match=rf"{LAST} of another run.*choose another folder"):
        begin_anew()
