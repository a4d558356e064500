"""Requirements for checkpoints of the trainers on transformers.Trainer."""

import copy
import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tests.lm.hf.run_resume import PAIRS, STEPS, TEXTS, make, run
from transformers import TrainerCallback, TrainerState

from trimtab_common.locks import LOCK
from trimtab_common.sealing import CheckpointError, checkpoints, latest_checkpoint, main

TRAINERS = ("sft", "dpo", "reward", "grpo", "iterative_sft")


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.fixture(scope="module", params=TRAINERS)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """Returns a trainer's kind, the folder of its finished run with all four checkpoints, and its last weights."""
    folder = tmp_path_factory.mktemp(request.param)
    trainer = make(request.param, folder, save_total_limit=None)
    run(trainer, resume=None)
    return request.param, folder, copy.deepcopy(trainer.model.state_dict())


@pytest.fixture
def saved(finished: tuple[str, Path, Any], tmp_path: Path) -> tuple[str, Path, Any]:
    """Copies the finished run into the test's folder."""
    name, folder, weights = finished
    shutil.copytree(folder, tmp_path / "run")
    return name, tmp_path / "run", weights


def assert_weights(trainer: Any, weights: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(weight, weights[name]) for name, weight in trainer.model.state_dict().items())


def file_of(part: str, trainer: str) -> str:
    """Returns the checkpoint file that holds a part: written by Trainer, or by accelerate in IterativeSFT's loop."""
    files = {"model": "model.safetensors", "state": "trainer_state.json", "schedule": "scheduler.pt"}
    if trainer == "iterative_sft":
        files |= {"optimizer": "optimizer.bin", "random states": "random_states_0.pkl"}
    else:
        files |= {"optimizer": "optimizer.pt", "random states": "rng_state.pth"}
    return files[part]


# ------------------------------------------------------------------------------------------------ damage


@pytest.mark.parametrize("part", ["optimizer", "schedule", "random states", "state"])
def test_a_missing_file_is_named_and_the_last_complete_checkpoint_is_resumed(saved, part):
    name, folder, weights = saved
    file = file_of(part, name)
    broken = folder / f"checkpoint-{STEPS}"
    (broken / file).unlink()
    with pytest.raises(CheckpointError, match=rf"checkpoint-{STEPS}/{file}: missing"):
        run(make(name, folder), resume=str(broken))
    trainer = make(name, folder, save_total_limit=None)
    with pytest.warns(UserWarning, match=f"Passing over .*checkpoint-{STEPS}: .*{file}"):
        run(trainer, resume=True)
    assert_weights(trainer, weights)


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_flipped_bit_is_an_error_that_names_the_file(saved, part):
    name, folder, _ = saved
    file = file_of(part, name)
    flip_a_byte(folder / f"checkpoint-{STEPS}" / file)
    for resume in (True, str(folder / f"checkpoint-{STEPS}")):
        with pytest.raises(CheckpointError, match=rf"checkpoint-{STEPS}/{file}: changed since it was saved"):
            run(make(name, folder), resume=resume)


@pytest.mark.slow
@pytest.mark.parametrize("cause", [errno.ENOSPC, errno.EDQUOT])
def test_a_save_that_failed_is_passed_over_and_its_remnant_removed(cause, tmp_path, monkeypatch):
    def full_disk(state: TrainerState, path: str, save: Callable[..., None] = TrainerState.save_to_json) -> None:
        if state.global_step == 2:
            raise OSError(cause, os.strerror(cause))
        save(state, path)

    with monkeypatch.context() as patch:
        patch.setattr(TrainerState, "save_to_json", full_disk)
        with pytest.raises(CheckpointError, match=f"checkpoint-2 is not saved: .*{os.strerror(cause)}"):
            run(make("sft", tmp_path), resume=None)
    newest = latest_checkpoint(tmp_path)
    assert newest is not None
    assert newest.name == "checkpoint-1"
    with pytest.raises(CheckpointError, match=r"checkpoint-2 does not exist.*resume from .*checkpoint-1"):
        run(make("sft", tmp_path), resume=str(tmp_path / "checkpoint-2"))
    run(make("sft", tmp_path), resume=True)
    names = {path.name for path in tmp_path.iterdir()}
    assert names - {LOCK} == {f"checkpoint-{STEPS}"}  # the lock stays as long as the failed trainer lives


def test_resuming_without_a_complete_checkpoint_and_from_a_model_alone_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no complete checkpoint in"):
        run(make("sft", tmp_path), resume=True)
    run(make("sft", tmp_path, save_only_model=True), resume=None)
    with pytest.raises(CheckpointError, match=r"saved with save_only_model=True.*start a new run"):
        run(make("sft", tmp_path), resume=True)


def test_the_newest_checkpoint_of_a_folder_is_resumed(saved):
    name, folder, weights = saved
    trainer = make(name, folder, save_total_limit=None)
    run(trainer, resume=str(folder))
    assert_weights(trainer, weights)


def test_a_path_without_a_checkpoint_is_refused_and_not_to_be_removed(tmp_path):
    (tmp_path / "empty").mkdir()
    for name, problem in (("empty", "is not a checkpoint, and holds none"), ("nowhere", "does not exist")):
        with pytest.raises(CheckpointError, match=f"{name}.*{problem}") as refused:
            run(make("sft", tmp_path / "run"), resume=str(tmp_path / name))
        assert "remove" not in str(refused.value)


@pytest.mark.slow
def test_a_checkpoint_whose_owner_vouches_for_it_can_be_sealed(tmp_path):
    run(make("sft", tmp_path), resume=None)
    folder = tmp_path / f"checkpoint-{STEPS}"
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"python -m trimtab_common\.sealing .*checkpoint-4"):
        run(make("sft", tmp_path), resume=str(folder))
    main([str(folder)])
    trainer = make("sft", tmp_path, max_steps=STEPS + 1)
    run(trainer, resume=str(folder))
    assert trainer.state.global_step == STEPS + 1


# ------------------------------------------------------------------------------------------------ other runs


def test_a_new_run_is_refused_a_folder_with_the_checkpoints_of_another(saved):
    name, folder, _ = saved
    with pytest.raises(CheckpointError, match=r"checkpoint-1, checkpoint-2.* of another run.*choose another folder"):
        run(make(name, folder), resume=None)
    run(make(name, folder, save_strategy="no"), resume=None)  # writes nothing there
    trainer = make(name, folder, overwrite_output_dir=True)
    run(trainer, resume=None)
    kept = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert kept == [*(f"_replaced-1-checkpoint-{step}" for step in range(1, STEPS + 1)), f"checkpoint-{STEPS}"]


CHANGES: dict[str, tuple[str, Any]] = {
    "sft": ("learning_rate", 5e-3),
    "dpo": ("weight_decay", 0.1),
    "reward": ("seed", 7),
    "grpo": ("per_device_train_batch_size", 1),
    "iterative_sft": ("learning_rate", 5e-3),
}


def test_a_resume_with_another_setting_lists_it_and_needs_the_flag(saved):
    name, folder, _ = saved
    setting, value = CHANGES[name]
    change, before = {setting: value}, folder / "checkpoint-2"
    with pytest.raises(CheckpointError, match=rf"{setting} was .*, is {value}"):
        run(make(name, folder, **change), resume=str(before))
    trainer = make(name, folder, resume_with_changes=True, save_total_limit=None, **change)
    with pytest.warns(UserWarning, match=f"Resuming .*checkpoint-2 with changes: {setting} was"):
        run(trainer, resume=str(before))
    assert trainer.state.global_step > 2


def test_settings_that_change_no_result_may_differ(saved):
    name, folder, weights = saved
    trainer = make(name, folder, logging_steps=2, save_steps=2, run_name="another", save_total_limit=3)
    run(trainer, resume=str(folder / "checkpoint-2"))
    assert_weights(trainer, weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "dpo", "reward", "grpo"])
def test_another_dataset_is_refused(tmp_path, name):
    run(make(name, tmp_path), resume=None)
    trainer = make(name, tmp_path, max_steps=STEPS + 1)
    rows = PAIRS if name != "sft" else [{"text": t} for t in TEXTS]
    rows = [{column: f"another {column}" for column in row} for row in rows]
    other = make_with(name, tmp_path, Dataset.from_list(rows))
    with pytest.raises(CheckpointError, match="training data was"):
        other.train(resume_from_checkpoint=True)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == STEPS + 1


def make_with(name: str, folder: Path, data: Dataset) -> Any:
    trainer = make(name, folder)
    arguments = {
        "model": trainer.model,
        "args": trainer.args,
        "train_dataset": data,
        "processing_class": trainer.tokenizer,
    }
    if name == "grpo":
        arguments |= {
            "reward_funcs": trainer.sampler.rewards.functions[0],
            "train_dataset": data.select_columns("prompt"),
        }
    return type(trainer)(**arguments)


def test_another_model_is_refused(tmp_path):
    run(make("sft", tmp_path), resume=None)
    trainer = make("sft", tmp_path)
    trainer.model.transformer.wte.weight.requires_grad_(False)
    with pytest.raises(CheckpointError, match="model was"):
        trainer.train(resume_from_checkpoint=True)


# ------------------------------------------------------------------------------------------------ progress


def test_a_finished_run_that_is_resumed_trains_nothing(finished, tmp_path):
    name, folder, weights = finished
    if name == "iterative_sft":
        return  # the caller owns the loop: `step` raises after max_steps
    shutil.copytree(folder / f"checkpoint-{STEPS}", tmp_path / f"checkpoint-{STEPS}")
    for _ in range(2):
        trainer = make(name, tmp_path)
        with pytest.warns(UserWarning, match=f"The run is finished: {STEPS} of {STEPS} steps are done"):
            trainer.train(resume_from_checkpoint=True)
        assert trainer.state.global_step == STEPS
        assert_weights(trainer, weights)


@pytest.mark.slow
def test_a_finished_run_that_is_resumed_neither_evaluates_nor_saves_again(tmp_path):
    more: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch", "eval_texts": TEXTS}
    trainer = make("sft", tmp_path, **more)
    trainer.train()
    history = [line for line in trainer.state.log_history if "eval_loss" in line]
    written = (tmp_path / f"checkpoint-{STEPS}").stat().st_ctime_ns
    trainer = make("sft", tmp_path, **more)
    with pytest.warns(UserWarning, match="The run is finished"):
        trainer.train(resume_from_checkpoint=True)
    assert [line for line in trainer.state.log_history if "eval_loss" in line] == history
    assert (tmp_path / f"checkpoint-{STEPS}").stat().st_ctime_ns == written


# ------------------------------------------------------------------------------------------------ rotation


class Watch(TrainerCallback):
    """Records which checkpoints are complete when a save begins its last file."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.complete: list[str | None] = []
        save = TrainerState.save_to_json

        def noting(state: TrainerState, path: str) -> None:
            newest = latest_checkpoint(folder)
            self.complete.append(newest and newest.name)
            save(state, path)

        monkeypatch.setattr(TrainerState, "save_to_json", noting)


@pytest.mark.filterwarnings("ignore:Passing over")
def test_the_old_checkpoint_goes_after_the_new_one_is_sealed(tmp_path, monkeypatch):
    trainer = make("sft", tmp_path, save_total_limit=1)
    watch = Watch(tmp_path, monkeypatch)
    trainer.train()
    assert watch.complete == [None, "checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert [path.name for path in tmp_path.iterdir()] == [f"checkpoint-{STEPS}"]
    assert trainer.args.save_total_limit == 1


def test_the_best_checkpoint_stays_beside_the_last(tmp_path):
    losses = [1.0, 0.5, 2.0, 3.0]
    trainer = make(
        "sft",
        tmp_path,
        save_total_limit=1,
        eval_texts=TEXTS,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_fake",
        greater_is_better=False,
    )
    trainer.evaluate = lambda **_: {"eval_fake": losses[trainer.state.global_step - 1]}
    trainer.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", f"checkpoint-{STEPS}"]


class Terminate(TrainerCallback):
    """Sends this process one signal, in the step after `at` steps."""

    def __init__(self, at: int = 1, number: int = signal.SIGTERM):
        self.at, self.number = at, number

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at:
            os.kill(os.getpid(), self.number)
            self.at = -1


def test_enable_jit_checkpoint_saves_when_a_signal_comes_and_at_no_other_time(tmp_path):
    handler = signal.getsignal(signal.SIGTERM)
    trainer = make("sft", tmp_path, save_strategy="no", enable_jit_checkpoint=True, max_steps=30)
    trainer.add_callback(Terminate)
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == handler
    assert list(checkpoints(tmp_path)) == [2]  # the step that had begun
    assert latest_checkpoint(tmp_path) is not None


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "step"), [("steps", 3), ("epoch", 4)])
def test_a_signal_in_the_last_step_of_an_epoch_leaves_the_epochs_evaluation_in_place(tmp_path, strategy, step):
    """An epoch has three steps: its evaluation comes before the process ends, or after the resume."""
    more: dict[str, Any] = {"eval_strategy": strategy, "eval_steps": 3, "save_strategy": strategy, "save_steps": 3}
    trainer = make("sft", tmp_path, max_steps=9, eval_texts=TEXTS, **more)
    trainer.add_callback(Terminate(at=2))
    with pytest.raises(SystemExit):
        trainer.train()
    assert max(checkpoints(tmp_path)) == step
    trainer = make("sft", tmp_path, max_steps=9, eval_texts=TEXTS, **more)
    trainer.train(resume_from_checkpoint=True)
    evaluated = [line["step"] for line in trainer.state.log_history if "eval_loss" in line]
    assert evaluated == [3, 6, 9]


@pytest.mark.slow
def test_after_a_keyboard_interrupt_a_notebook_trains_on(tmp_path):
    trainer = make("sft", tmp_path, save_total_limit=None)
    trainer.add_callback(Terminate(at=1, number=signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert list(checkpoints(tmp_path)) == [1, 2]
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == STEPS
