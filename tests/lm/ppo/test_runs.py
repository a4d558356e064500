"""A folder holds the checkpoints of one PPO run, and a run resumes with its original settings."""

import pytest
from datasets import Dataset
from tests.lm import tiny

from trimtab_common.sealing import CheckpointError

CHANGES = {"learning_rate": 3e-5, "seed": 5, "gamma": 0.9, "init_kl_coef": 0.7, "target": 2.0, "mini_batch_size": 2}


def trainer(folder, rows=((5,), (6,), (7,), (8,)), **settings):
    data = Dataset.from_dict({"input_ids": [list(row) for row in rows]})
    return tiny.ppo(arguments={"dataset": data}, output_dir=str(folder), **{"save_steps": 1} | settings)


def train(one, steps, resume_from=None):
    sampling = {"max_new_tokens": 3}
    return one.train(
        lambda queries, responses: [1.0, 2.0, 3.0, 4.0],
        steps=steps,
        resume_from=resume_from,
        generation_kwargs=sampling,
    )


@pytest.mark.parametrize("save_steps", [1, None])
def test_a_new_run_in_the_folder_of_another_is_refused_before_its_first_step(tmp_path, save_steps):
    """Without save_steps too: a run that a signal ends is saved."""
    train(trainer(tmp_path), 1)
    second = trainer(tmp_path, save_steps=save_steps)
    with pytest.raises(CheckpointError, match="checkpoint-1 of another run"):
        train(second, 2)
    assert second.steps_done == 0
    second.step(*tiny.batch())
    with pytest.raises(CheckpointError, match="checkpoint-1 of another run"):
        second.save_checkpoint()


@pytest.mark.parametrize("setting", CHANGES)
def test_a_resume_with_another_setting_is_refused_or_said(tmp_path, setting):
    train(trainer(tmp_path), 1)
    change = {setting: CHANGES[setting]}
    with pytest.raises(CheckpointError, match=f"{setting} was .*, is {CHANGES[setting]}"):
        train(trainer(tmp_path, **change), 2, "latest")
    accepting = trainer(tmp_path, resume_with_changes=True, **change)
    is_held = setting in ("learning_rate", "init_kl_coef")
    says = f"with changes: {setting} was .*" + (f"state holds {setting}: its values stay in effect" if is_held else "")
    with pytest.warns(UserWarning, match=says):
        train(accepting, 2, "latest")
    assert accepting.steps_done == 2
    if setting == "learning_rate":
        assert accepting.optimizer.param_groups[0]["lr"] == 1e-3


def test_a_resume_with_another_dataset_is_refused(tmp_path):
    train(trainer(tmp_path), 1)
    with pytest.raises(CheckpointError, match="training data was"):
        train(trainer(tmp_path, rows=((5,), (6,), (7,), (9,))), 2, "latest")


def test_a_longer_run_with_other_names_is_resumed(tmp_path):
    train(trainer(tmp_path), 1)
    longer = trainer(tmp_path, steps=7, exp_name="other", save_total_limit=2)
    train(longer, 2, "latest")
    assert longer.steps_done == 2
