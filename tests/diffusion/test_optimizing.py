"""The optimizer of the diffusion trainers has the config's settings."""

import sys
from pathlib import Path

import pytest
import torch
from tests.diffusion import tiny

from trimtab_diffusion import DDPOConfig, DDPOStableDiffusionPipeline
from trimtab_diffusion.training.optimizing import optimizer_of


def optimizer(folder: Path, **settings: float) -> torch.optim.Optimizer:
    config = DDPOConfig(logdir=str(folder), mixed_precision="no", **settings)
    return optimizer_of(config, DDPOStableDiffusionPipeline(tiny.stable_diffusion()))


def test_adamw_has_the_settings_of_the_config(tmp_path: Path):
    betas = {"train_adam_beta1": 0.2, "train_adam_beta2": 0.3}
    others = {"train_learning_rate": 0.1, "train_adam_epsilon": 0.4, "train_adam_weight_decay": 0.5}
    adamw = optimizer(tmp_path, **betas, **others)
    assert isinstance(adamw, torch.optim.AdamW)
    (group,) = adamw.param_groups
    assert (group["betas"], group["lr"], group["eps"], group["weight_decay"]) == ((0.2, 0.3), 0.1, 0.4, 0.5)


def test_8_bit_moments_without_bitsandbytes_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ImportError, match="train_use_8bit_adam needs the package bitsandbytes: pip install"):
        optimizer(tmp_path, train_use_8bit_adam=True)
