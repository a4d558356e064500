"""A run continues from its checkpoints with everything that its trainer registered."""

import random
import secrets
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from trimtab_common import hub, sealing
from trimtab_common import run as run_module
from trimtab_common.formulas.kl import AdaptiveKLController
from trimtab_common.health import HealthMonitor, Vitals
from trimtab_common.locks import LOCK, free, hold
from trimtab_common.run import Run
from trimtab_common.run_record import RunRecord
from trimtab_common.sealing import CheckpointError
from trimtab_common.tracking import start_tracking


class Prompts:
    """A part whose state differs between processes."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.position = state_dict["position"]


class Loop:
    """The smallest trainer: momentum, a scheduler, a controller, counters, noise and a frozen layer."""

    def __init__(self, *, hidden: int = 2, settings: dict[str, Any] | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, hidden), nn.Linear(hidden, 1))
        model[0].requires_grad_(False)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        self.accelerator = Accelerator(cpu=True)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        self.kl_ctl = AdaptiveKLController(1.0, target=1.0, horizon=10)
        self.absent, self.steps_done, self.prompts = None, 0, Prompts()
        self.run = Run(
            self.accelerator,
            self.model,
            RunRecord(secrets.token_hex(4), settings or {"seed": 0}),
            health=HealthMonitor(patience=1),
            start_tracker=partial(start_tracking, "none", project="p", config={}),
            **options,
        )
        self.run.keep(self, "optimizer", "lr_scheduler", "kl_ctl", "absent", "steps_done")
        self.run.keep_per_rank("prompts", self.prompts)

    def step(self) -> None:
        noise = torch.randn(2) + random.random()
        self.accelerator.backward(self.kl_ctl.value * self.model(noise).square().sum())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.lr_scheduler.step()
        self.kl_ctl.update(2.0, 1)
        self.prompts.position += 3
        self.steps_done += 1

    def everything(self) -> list[Any]:
        weights = [weight.tolist() for weight in self.model.parameters()]
        return [weights, self.kl_ctl.value, self.lr_scheduler.get_last_lr(), self.steps_done, self.prompts.position]


def steps(loop: Loop, count: int) -> Loop:
    for _ in range(count):
        loop.step()
    return loop


def test_four_steps_equal_two_a_save_a_load_and_two(tmp_path):
    random.seed(1)
    straight = steps(Loop(), 4).everything()
    random.seed(1)
    path = steps(Loop(), 2).run.save(tmp_path, 2)
    torch.manual_seed(9)
    resumed = Loop()
    resumed.run.load(path)
    assert steps(resumed, 2).everything() == straight


def test_the_tracker_starts_at_its_first_use_under_the_id_of_the_checkpoint(tmp_path):
    first = Loop()
    assert first.run.tracker_id is None
    started = first.run.tracker.run_id
    assert first.run.tracker_id == started
    path = first.run.save(tmp_path, 0)
    resumed = Loop()
    resumed.run.load(path)
    assert resumed.run.tracker.run_id == started


def test_a_checkpoint_that_a_killed_run_still_publishes_is_the_newest(tmp_path, monkeypatch):
    loop = steps(Loop(), 1)
    loop.run.save(tmp_path, 1)
    aside = steps(loop, 1).run.save(tmp_path, 2).rename(tmp_path / "aside")
    free(loop.run)

    def held(folder, run):
        if aside.exists():
            aside.rename(tmp_path / "checkpoint-2")
        hold(folder, run)

    monkeypatch.setattr(run_module, "hold", held)
    assert Loop().run.resume("latest", tmp_path) == tmp_path / "checkpoint-2"


def test_a_new_folder_is_locked_while_a_run_trains(tmp_path):
    with Loop().run.training(tmp_path / "new"):
        assert (tmp_path / "new" / LOCK).exists()
    assert not (tmp_path / "new" / LOCK).exists()


def test_a_checkpoint_is_not_resumed_into_the_folder_of_another_run(tmp_path):
    mine, other = steps(Loop(), 1), steps(Loop(), 1)
    path = mine.run.save(tmp_path / "mine", 1)
    other.run.save(tmp_path / "others", 1)
    free(other.run)
    refused = Loop()
    with pytest.raises(CheckpointError, match="of another run, whose checkpoints would mix"):
        refused.run.resume(path, tmp_path / "others")
    assert not (tmp_path / "others" / LOCK).exists()


def test_a_tracker_goes_back_with_the_run(tmp_path):
    loop = Loop()
    path = loop.run.save(tmp_path, 1)
    for step in (1, 2, 3):
        loop.run.tracker.log({"loss": 1.0}, step)
    kept = loop.run.tracker.run_id
    loop.run.load(path)
    loop.run.tracker.log({"loss": 1.0}, 2)
    assert loop.run.tracker.run_id != kept  # the checkpoint is older than the tracker


def test_a_folder_that_is_sealed_anew_keeps_what_its_manifest_says(tmp_path):
    path = steps(Loop(), 1).run.save(tmp_path, 1)
    (path / ".manifest.json.tmp").write_text("of a process that was killed")
    sealing.main([str(path)])
    resumed = Loop()
    resumed.run.load(path)
    assert resumed.steps_done == 1
    with pytest.raises(CheckpointError, match=r"settings|another"):
        Loop(settings={"seed": 1}).run.load(path)
    (path / "manifest.json").unlink()
    sealing.main([str(path)])
    with pytest.raises(CheckpointError, match="does not say processes and tied"):
        Loop().run.load(path)


def test_frozen_weights_are_not_saved(tmp_path):
    from safetensors.torch import load_file

    assert set(load_file(Loop().run.save(tmp_path, 0) / "weights.safetensors")) == {"1.weight", "1.bias"}


def test_an_attribute_is_saved_as_it_is_at_that_moment(tmp_path):
    loop = Loop()
    loop.kl_ctl = AdaptiveKLController(7.0, target=1.0, horizon=10)
    resumed = Loop()
    resumed.run.load(loop.run.save(tmp_path, 0))
    assert resumed.kl_ctl.value == 7.0


def test_a_checkpoint_with_other_weights_parts_or_settings_is_refused_before_anything_is_loaded(tmp_path):
    path = steps(Loop(), 1).run.save(tmp_path, 1)
    deeper, more, less, wider, other = Loop(), Loop(), Loop(), Loop(hidden=3), Loop(settings={"seed": 1})
    deeper.model[0].requires_grad_(True)
    more.extra = 1
    more.run.keep(more, "extra")
    less.run._kept_per_rank.clear()
    for loop, problem in (
        (deeper, r"checkpoint-1 holds other weights than this trainer: 0\.bias, 0\.weight"),
        (more, "holds other parts than this trainer: extra"),
        (less, "holds other parts than this trainer: prompts"),
        (wider, r"1\.weight has shape \[1, 2\], this trainer's has \[1, 3\]"),
        (other, "seed was 0, is 1"),
    ):
        before = loop.everything()
        with pytest.raises(CheckpointError, match=problem):
            loop.run.load(path)
        assert loop.everything() == before


def test_changed_settings_are_accepted_with_a_warning_where_the_trainer_says_so(tmp_path):
    path = Loop().run.save(tmp_path, 0)
    changed = Loop(settings={"seed": 1}, accepts_changes=True, held=["seed"])
    with pytest.warns(UserWarning, match=r"seed was 0, is 1.* state holds seed"):
        changed.run.load(path)


@pytest.mark.parametrize(
    ("where", "step"), [("latest", 2), ("{root}", 2), ("{root}/checkpoint-1", 1), ("{root}/checkpoint-2", 2)]
)
def test_a_run_resumes_from_a_checkpoint_or_the_newest_of_a_folder(tmp_path, where, step):
    first = Loop()
    for done in (1, 2):
        steps(first, 1).run.save(tmp_path, done)
    resumed = Loop()
    assert resumed.run.resume(where.format(root=tmp_path), tmp_path) == tmp_path / f"checkpoint-{step}"
    assert resumed.steps_done == step
    resumed.run.save(tmp_path, step)  # the folder belongs to the same run


def test_latest_is_a_start_where_there_is_no_checkpoint(tmp_path):
    assert Loop().run.resume("latest", tmp_path) is None


def test_a_path_without_a_checkpoint_is_refused_with_the_reason(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "checkpoint-3").mkdir()
    for name, problem in (
        ("empty", "is not a checkpoint, and holds none"),
        ("nowhere", "does not exist"),
        ("checkpoint-3", r"manifest.json.*cut short"),
    ):
        with pytest.raises(CheckpointError, match=problem):
            Loop().run.resume(tmp_path / name, tmp_path)


def test_a_run_does_not_save_beside_the_checkpoints_of_another(tmp_path):
    Loop().run.save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="checkpoint-1 of another run"):
        Loop().run.save(tmp_path, 2)


def test_what_goes_wrong_is_warned_of_by_step_and_logged():
    with pytest.warns(UserWarning, match="step 7: health/constant_rewards"):
        logged = Loop().run.health.report(Vitals(reward_std=0.0), {"loss": 1.0}, when="step 7", warns=True)
    assert logged == {"health/alerts": 1.0, "health/constant_rewards": 0.0}


def test_the_files_that_are_pushed_are_those_that_were_written(monkeypatch):
    uploaded: dict[str, Any] = {}

    def upload(*, repo_id: str, folder_path: Path, **options: Any) -> str:
        uploaded.update({file.name: file.read_text() for file in folder_path.iterdir()}, repo_id=repo_id, **options)
        return "commit"

    monkeypatch.setattr(hub, "create_repo", lambda name, **_: type("Url", (), {"repo_id": name}))
    monkeypatch.setattr(hub, "upload_folder", upload)
    written = Loop().run.push(lambda folder: (Path(folder) / "weights").write_text("w"), "me/model", commit_message="1")
    assert written == "commit"
    assert uploaded.pop("ignore_patterns") == ["_*"]  # a run's lock, and the folders that it renamed
    assert uploaded == {"weights": "w", "repo_id": "me/model", "commit_message": "1"}
