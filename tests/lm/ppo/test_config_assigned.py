"""PPOConfig is a plain dataclass until a trainer takes it; assignments in scripts of early 2024 take effect."""

import copy
import dataclasses

import pytest
import torch
from tests.lm import tiny

from trimtab_lm import PPOConfig, PPOTrainer


def trainer_of(config):
    return PPOTrainer(config, tiny.policy(), tokenizer=tiny.tokenizer())


def test_assigned_fields_reach_the_trainer_and_sizes_follow():
    config = PPOConfig(batch_size=8, mini_batch_size=8, log_with="tensorboard")
    config.log_with = None
    config.mini_batch_size = 2
    config.learning_rate = 0.25
    trainer = trainer_of(config)
    assert trainer.config.log_with is None
    assert (trainer.config.mini_batch_size, trainer.config.backward_batch_size) == (2, 2)
    assert trainer.config.global_backward_batch_size == 2
    assert trainer.optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("learning_rate", -1.0, "learning_rate=-1.0"),
        ("mini_batch_size", 3, "does not split into optimizer steps of mini_batch_size 3"),
        ("backward_batch_size", 4, "contradicts the other sizes, which make 2"),
        ("kl_penalty", "kk", "kl_penalty='kk'"),
    ],
)
def test_assigned_fields_are_checked_when_a_trainer_takes_them(name, value, message):
    config = PPOConfig(batch_size=8, mini_batch_size=2)
    setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        trainer_of(config)


def test_a_deprecated_name_may_be_assigned():
    config = PPOConfig(batch_size=8)
    config.forward_batch_size = 4
    with pytest.warns(FutureWarning, match="forward_batch_size=.* is now mini_batch_size="):
        assert trainer_of(config).config.mini_batch_size == 4


def test_a_trainers_config_is_fixed_and_the_callers_stays_as_it_was():
    config = PPOConfig(batch_size=8)
    trainer = trainer_of(config)
    for taken in (trainer.config, copy.deepcopy(trainer.config)):
        with pytest.raises(dataclasses.FrozenInstanceError, match="A trainer has taken this PPOConfig: cliprange"):
            taken.cliprange = 0.1
    assert trainer.config.cliprange == 0.2
    again = dataclasses.replace(trainer.config, cliprange=0.1)
    again.cliprange = 0.3
    assert trainer_of(again).config.cliprange == 0.3
    config.cliprange = 0.4
    assert config.world_size is None


def test_total_ppo_epochs_is_steps_over_batch_size_rounded_up():
    assert PPOConfig(steps=100, batch_size=8).total_ppo_epochs == 13
    config = PPOConfig(steps=16, batch_size=8, total_ppo_epochs=2)
    config.steps = 24
    assert trainer_of(config).config.total_ppo_epochs == 3
    with pytest.warns(
        FutureWarning, match=r"total_ppo_epochs=7\) has no effect: it is steps / batch_size = 2. Set steps"
    ):
        assert PPOConfig(steps=16, batch_size=8, total_ppo_epochs=7).total_ppo_epochs == 2


def test_current_device_may_be_assigned():
    trainer = tiny.ppo()
    assert trainer.current_device == trainer.accelerator.device
    trainer.current_device = "meta"
    assert trainer.current_device == torch.device("meta")
    trainer.current_device = torch.device("cpu")
    trainer.step(*tiny.batch())
