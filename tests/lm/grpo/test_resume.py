"""A training that stops in mid-rollout or mid-epoch continues as if it had not stopped."""

import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.lm import tiny
from tests.lm.grpo.run_distributed import prompts, trainer
from tests.marks import slow_but
from transformers import TrainerCallback

from trimtab_common.sealing import CheckpointError
from trimtab_lm.grpo.batches import RolloutBuffer
from trimtab_lm.grpo.saving import Progress

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:step .* health/")

STEPS = 10
SETTINGS = {
    "in a rollout": ({"steps_per_generation": 4, "gradient_accumulation_steps": 2, "train_dataset": prompts(33)}, 2),
    "in a second pass": ({"steps_per_generation": 2, "num_iterations": 2}, 3),
    "in an epoch": ({"train_dataset": prompts(9)}, 6),
    "at the end of an epoch": ({"train_dataset": prompts(9)}, 4),
    "with a reference": ({"steps_per_generation": 3, "beta": 0.1}, 4),
}


class Stop(TrainerCallback):
    def __init__(self, at):
        self.at = at

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = control.should_training_stop or state.global_step == self.at


def noisy(completions, **_):
    """Returns random rewards that depend on every library's global generator."""
    return [len(set(text)) + random.random() + np.random.rand() + float(torch.rand(())) for text in completions]


def make(folder, settings, **more):
    """Trains with dropout, shuffled prompts and a falling learning rate; each process starts from its own seed."""
    seed = random.randrange(2**31)
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    options = {
        "rollout": None,
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": 1,
        "disable_dropout": False,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.1,
        "learning_rate": 3e-3,
    }
    return trainer(str(folder), tiny.gpt2(), noisy, **options | settings | more)


def quietly(train, *args):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "step 1: health/")
        train(*args)


@pytest.mark.parametrize("name", slow_but(SETTINGS, "in a rollout"))
def test_a_resumed_training_ends_in_the_same_bits(tmp_path, name):
    settings, at = SETTINGS[name]
    whole = make(tmp_path / "whole", settings)
    quietly(whole.train)
    stopped = make(tmp_path / "cut", settings, callbacks=[Stop(at)])
    quietly(stopped.train)
    assert stopped.state.global_step == at
    resumed = make(tmp_path / "cut", settings)
    calls = []
    generate = resumed.backend.generate
    resumed.backend.generate = lambda *args, **options: calls.append(1) or generate(*args, **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == STEPS
    for key, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[key]), key
    logs = [[entry for entry in grpo.state.log_history if "loss" in entry] for grpo in (whole, resumed)]
    assert logs[0] == logs[1]
    per_rollout = settings.get("steps_per_generation", 1) * settings.get("num_iterations", 1)
    assert len(calls) == -(-STEPS // per_rollout) - -(-at // per_rollout)


def test_evaluation_does_not_change_what_follows(tmp_path):
    settings = {"steps_per_generation": 2, "num_iterations": 2}
    runs = []
    for name, more in (("without", {}), ("with", {"eval_strategy": "steps", "eval_steps": 1})):
        runs.append(make(tmp_path / name, settings, eval_dataset=prompts(3), **more))
        quietly(runs[-1].train)
    assert "eval_reward" in runs[1].state.log_history[1]
    for key, weight in runs[0].model.state_dict().items():
        assert torch.equal(weight, runs[1].model.state_dict()[key]), key


def test_a_checkpoint_that_lost_its_rollout_is_refused_and_one_of_fewer_processes_warned_of(tmp_path):
    settings = {"steps_per_generation": 4}
    quietly(make(tmp_path, settings, callbacks=[Stop(2)]).train)
    checkpoint = tmp_path / "checkpoint-2"
    with pytest.warns(UserWarning, match=r"rollout_1.pt does not exist: training goes on with a new rollout"):
        Progress(RolloutBuffer(micro_batches=1, passes=1)).load(str(checkpoint), 1, processes=2)
    with pytest.warns(UserWarning, match=r"one of 1 processes: training goes on with a new rollout"):
        Progress(RolloutBuffer(micro_batches=1, passes=1)).load(str(checkpoint), 0, processes=2)
    older = torch.load(checkpoint / "rollout_0.pt", weights_only=True)
    (tmp_path / "older").mkdir()
    torch.save(older | {"buffer": {"groups": []}}, tmp_path / "older" / "rollout_0.pt")
    with pytest.warns(UserWarning, match=r"is of another release: training goes on with a new rollout"):
        Progress(RolloutBuffer(micro_batches=1, passes=1)).load(str(tmp_path / "older"), 0, processes=1)
    (checkpoint / "rollout_0.pt").unlink()
    with pytest.raises(CheckpointError, match=r"rollout_0\.pt: missing"):
        make(tmp_path, settings).train(resume_from_checkpoint=str(checkpoint))


def test_other_settings_in_the_middle_of_a_rollout_are_refused(tmp_path):
    quietly(make(tmp_path, {"steps_per_generation": 4}, callbacks=[Stop(2)]).train)
    with pytest.raises(ValueError, match="Resume with the settings of the checkpoint"):
        make(tmp_path, {"steps_per_generation": 2, "resume_with_changes": True}).train(resume_from_checkpoint=True)


def test_a_save_of_the_model_alone_holds_no_rollout(tmp_path):
    grpo = make(tmp_path, {"save_only_model": True}, max_steps=1)
    quietly(grpo.train)
    grpo.save_model(str(tmp_path / "final"))
    assert not list(Path(tmp_path).rglob("rollout_*.pt"))
