"""RewardConfig: the documented defaults, the command line, and invalid settings."""

import warnings
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments

from trimtab_common.config import parse_config
from trimtab_lm.hf.config import CHECKPOINTING
from trimtab_lm.legacy.arguments import config_from
from trimtab_lm.reward import RewardConfig

ON_CPU = {"use_cpu": True}


def test_the_documented_defaults_do_not_warn(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = RewardConfig(str(tmp_path), **ON_CPU)
    assert config.max_length is None
    assert config.gradient_checkpointing
    assert getattr(config, CHECKPOINTING)  # transformers reads this
    assert config.report_to == []
    assert config.optim == "adamw_torch"


def test_activation_checkpointing_can_be_turned_off(tmp_path):
    for name in ("gradient_checkpointing", CHECKPOINTING):
        config = RewardConfig(str(tmp_path), **ON_CPU, **{name: False})
        assert not getattr(config, CHECKPOINTING)


def test_plain_training_arguments_become_a_config(tmp_path):
    config = config_from(TrainingArguments(str(tmp_path), learning_rate=3e-4, **ON_CPU), RewardConfig)
    assert config.learning_rate == 3e-4
    assert not getattr(config, CHECKPOINTING)  # as the user's settings say


FLAGS = {"max_length": 9, "truncation_mode": "keep_end", "center_rewards_coefficient": 0.01, "num_eval_samples": 3}


@pytest.mark.parametrize("parse", ["ours", "transformers"])
def test_fields_are_flags(parse: str, tmp_path):
    argv = ["--output_dir", str(tmp_path), "--use_cpu", "True", "--init_reward_head", "True"]
    argv += [word for name, value in FLAGS.items() for word in (f"--{name}", str(value))]
    if parse == "ours":
        (config,) = parse_config(RewardConfig, argv=[*argv, "--model_init_kwargs={'dtype': 'bfloat16'}"])
        assert config.model_init_kwargs == {"dtype": "bfloat16"}
    else:
        (config,) = HfArgumentParser(RewardConfig).parse_args_into_dataclasses(argv)
    assert config.init_reward_head is True
    assert {name: getattr(config, name) for name in FLAGS} == FLAGS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"truncation_mode": "both"}, "'both' is unknown. Use 'filter' or 'keep_start' or 'keep_end'"),
        ({"max_length": 1}, "leaves no room"),
        ({"center_rewards_coefficient": 0.0}, "a finite number above 0"),
        ({"center_rewards_coefficient": float("inf")}, "a finite number above 0"),
        ({"num_eval_samples": -1}, "num_eval_samples=-1 must be a whole number, 0 or above"),
        ({"label_smoothing_factor": 0.1}, "the loss of RewardTrainer"),
        ({"include_for_metrics": ["inputs"]}, "several answers share a row of the inputs of RewardTrainer"),
        ({"model_init_kwargs": {"num_labels": 2}}, "'num_labels': 2.*Leave num_labels out"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str, tmp_path):
    with pytest.raises(ValueError, match=message):
        RewardConfig(str(tmp_path), **ON_CPU, **settings)
