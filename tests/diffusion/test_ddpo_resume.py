"""A DDPO run that is killed and resumed equals an undisturbed run to the last bit."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.diffusion import tiny
from tests.diffusion.run_ddpo_resume import EPOCHS
from tools.chaos.trees import tree_difference

from trimtab_common.sealing import CheckpointError
from trimtab_diffusion import DDPOConfig, DDPOStableDiffusionPipeline, DDPOTrainer

ROOT = Path(__file__).parents[2]
# File operations in saves at which a run is killed, one after the other: the second file of the first checkpoint; the
# removal of the leftovers; the renaming of the finished one; the first file of the second; the first's removal.
SAVES = (2, 1, 10, 12, 13)


def run(*sessions: str) -> None:
    keep = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = keep | {"WANDB_MODE": "offline", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "tests.diffusion.run_ddpo_resume", *sessions]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def epochs(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "epochs.jsonl").read_text().splitlines()]


def without_run(line: dict[str, Any]) -> str:
    """Returns the line as text, in which floats are exact and NaN equals itself."""
    return json.dumps({name: value for name, value in line.items() if name != "run_id"}, sort_keys=True)


def assert_same_run(killed: Path, straight: Path) -> None:
    """Asserts that every epoch, before a kill or after it, and the final state equal those of the straight run."""
    expected = {line["epoch"]: without_run(line) for line in epochs(straight)}
    assert list(expected) == list(range(EPOCHS))
    entries = epochs(killed)
    assert {line["epoch"] for line in entries} == set(expected)
    for line in entries:
        assert without_run(line) == expected[line["epoch"]], line["epoch"]
    one, other = (torch.load(folder / "final.pt", weights_only=True) for folder in (killed, straight))
    assert tree_difference(one, other) == ""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folders of runs: undisturbed, killed at several places, killed within saves, killed for good."""
    folder = tmp_path_factory.mktemp("runs")
    kills = ("reward:3", "update:11", "hook:4", "epoch:5", "end")
    run(
        *(f"{folder}/straight-{kind},{kind},none,end" for kind in ("lora", "full")),
        *(f"{folder}/killed-{kind},{kind},none,{kill}" for kind in ("lora", "full") for kill in kills),
        *(f"{folder}/saves,lora,none,save:{operation}" for operation in SAVES),
        f"{folder}/saves,lora,none,end",
        f"{folder}/tracked,full,wandb,reward:4",
    )
    return folder


@pytest.mark.slow
def test_the_run_has_something_to_lose(runs):
    lora, full = (epochs(runs / f"straight-{kind}") for kind in ("lora", "full"))
    assert len({json.dumps(line["prompts"]) for line in lora}) > 2
    assert len({json.dumps(line["prompts"]) for line in full}) > 2
    assert len({line["stats"]["reward_mean"] for line in lora}) == EPOCHS
    assert len({line["stats"]["objective/kl_coef"] for line in full}) == EPOCHS
    assert len({line["stats"]["learning_rate"] for line in full}) == EPOCHS
    left = torch.load(runs / "straight-lora" / "final.pt", weights_only=True)
    assert max(len(rewards) for rewards in left["prompt_stats"].values()) == 5  # full, with min_count reached
    assert {line["updates"] for line in lora} == {4 * (epoch + 1) for epoch in range(EPOCHS)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_killed_in_the_reward_in_an_update_in_the_hook_and_after_an_epoch(runs, kind):
    assert_same_run(runs / f"killed-{kind}", runs / f"straight-{kind}")


@pytest.mark.slow
def test_killed_within_saves(runs):
    assert_same_run(runs / "saves", runs / "straight-lora")


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["saves", "straight-lora", "straight-full"])
def test_one_checkpoint_stays(runs, folder):
    assert [path.name for path in (runs / folder / "checkpoints").glob("checkpoint-*")] == [f"checkpoint-{EPOCHS - 1}"]


@pytest.mark.slow
def test_a_fresh_process_goes_on_and_so_does_the_tracker_under_its_id(runs):
    folder = runs / "tracked"
    run(f"{folder},full,wandb,end")
    assert_same_run(folder, runs / "straight-full")
    folders = [path.name for path in (folder / "wandb").glob("offline-run-*")]
    ids = {line["run_id"] for line in epochs(folder)}
    assert len(folders) == 2
    assert ids == {name.rpartition("-")[2] for name in folders}


# ------------------------------------------------------------------------ the checkpoint to resume


def trainer(folder: Path, *, use_lora: bool = True, rank: int = 4, **settings: Any) -> DDPOTrainer:
    config = DDPOConfig(
        **{
            "num_epochs": 2,
            "logdir": str(folder),
            "log_with": "none",
            "mixed_precision": "no",
            "sample_num_steps": 2,
            "sample_guidance_scale": 1.0,
            "sample_batch_size": 2,
            "sample_num_batches_per_epoch": 1,
            "train_batch_size": 2,
            "train_learning_rate": 1e-2,
        }
        | settings
    )
    with tiny.from_seed(1):
        pipeline = DDPOStableDiffusionPipeline(tiny.stable_diffusion(), use_lora=use_lora, lora_rank=rank)
    return DDPOTrainer(config, lambda images, *_: images.mean((1, 2, 3)), lambda: ("cat", {}), pipeline)


def weights(one: DDPOTrainer) -> torch.Tensor:
    return torch.cat([weight.flatten() for weight in one.model.parameters() if weight.requires_grad]).detach().clone()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, torch.Tensor]]:
    """Returns a folder with checkpoints of two epochs, and the weights after each."""
    folder = tmp_path_factory.mktemp("saved")
    one, after = trainer(folder), {}
    for epoch in range(2):
        one.train(epoch + 1)
        after[epoch + 1] = weights(one)
    return folder, after


def test_from_the_folder_of_a_checkpoint_or_the_newest_of_several(tmp_path, saved):
    folder, after = saved
    assert not torch.equal(after[1], after[2])
    for where, epoch in (("checkpoint-1", 1), ("checkpoint-2", 2), ("", 2)):
        resumed = trainer(tmp_path, resume_from=str(folder / "checkpoints" / where))
        assert torch.equal(weights(resumed), after[epoch])
        assert (resumed.first_epoch, resumed.global_step, resumed.queries) == (epoch, epoch, 2 * epoch)


def test_latest_is_the_newest_of_this_run_and_a_start_if_there_is_none(tmp_path, saved):
    folder, after = saved
    assert torch.equal(weights(trainer(folder, resume_from="latest")), after[2])
    fresh = trainer(tmp_path, resume_from="latest")
    assert fresh.first_epoch == 0
    assert torch.equal(weights(fresh), weights(trainer(tmp_path)))


def test_training_goes_on_from_the_epoch_of_the_checkpoint(tmp_path, saved):
    folder, after = saved
    resumed = trainer(tmp_path, resume_from=str(folder / "checkpoints" / "checkpoint-1"))
    history = resumed.train()
    assert [stats["epoch"] for stats in history] == [1.0]
    assert torch.equal(weights(resumed), after[2])
    assert trainer(folder, resume_from="latest").train() == []


def test_no_more_checkpoints_than_the_limit(tmp_path):
    trainer(tmp_path / "a", num_epochs=4, num_checkpoint_limit=2).train()
    trainer(tmp_path / "b", num_epochs=4, project_kwargs={"total_limit": 3, "project_dir": str(tmp_path / "c")}).train()
    assert sorted(path.name for path in (tmp_path / "a" / "checkpoints").iterdir()) == ["checkpoint-3", "checkpoint-4"]
    assert len([*(tmp_path / "c" / "checkpoints").iterdir()]) == 3
    assert not (tmp_path / "b" / "checkpoints").exists()


def test_an_interrupted_save_is_not_loaded(tmp_path, saved):
    folder, after = saved
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    newest = copy / "checkpoints" / "checkpoint-2"
    newest.rename(newest.with_name(".checkpoint-2.partial"))
    assert torch.equal(weights(trainer(copy, resume_from="latest")), after[1])


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere.*does not exist.*checkpoint-<step>"):
        trainer(tmp_path, resume_from=str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty.*is not a checkpoint, and holds none"):
        trainer(tmp_path, resume_from=str(tmp_path / "empty"))


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path, saved):
    folder, _ = saved
    where = str(folder / "checkpoints")
    for other, problem in (
        ({"use_lora": False}, "holds other weights than this trainer"),
        ({"rank": 2}, r"lora.* has shape \[4, .*\], this trainer's has \[2, "),
        ({"per_prompt_stat_tracking": True, "resume_with_changes": True}, "holds other parts .*: prompt_stats"),
    ):
        with pytest.raises(CheckpointError, match=problem):
            trainer(tmp_path, resume_from=where, **other)
