"""What W&B shows of a run of an experiment."""

import os

from experiments.huang_2024_details.train import settings as ppo_settings
from experiments.run_folders import run_name
from experiments.shao_2024_grpo.train import settings as grpo_settings


def test_a_name_has_what_differs_from_the_recipe_and_the_seed():
    base = {"target": 8.0, "learning_rate": 1e-5, "output_dir": "a", "seed": 0}
    assert run_name(base, base) == "seed=0"
    assert run_name({**base, "target": 6.0, "output_dir": "b", "seed": 3}, base) == "target=6.0 seed=3"


def test_a_ppo_run_is_in_the_group_of_its_paper(monkeypatch):
    (_, ppo) = ppo_settings(["--learning_rate", "5e-5", "--seed", "4", "--log_with", "none"])
    shown = {"name": "learning_rate=5e-05 seed=4", "group": "huang_2024_details", "job_type": "train"}
    assert ppo.tracker_kwargs["wandb"] == shown
    (_, ppo) = ppo_settings(["--tracker_kwargs", '{"wandb": {"name": "mine"}}'])
    assert ppo.tracker_kwargs["wandb"] == {**shown, "name": "mine"}


def test_a_run_of_transformers_trainer_too(monkeypatch):
    for name in ("WANDB_RUN_GROUP", "WANDB_JOB_TYPE"):
        monkeypatch.delenv(name, raising=False)
    (_, grpo) = grpo_settings(["--learning_rate", "3e-5", "--seed", "4"])
    assert grpo.run_name == "learning_rate=3e-05 seed=4"
    (_, grpo) = grpo_settings(["--run_name", "mine"])
    assert grpo.run_name == "mine"
    assert (os.environ["WANDB_RUN_GROUP"], os.environ["WANDB_JOB_TYPE"]) == ("shao_2024_grpo", "train")
