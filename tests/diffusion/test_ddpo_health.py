"""Provokes each fault of a DDPO run in a real trainer; the health report names it."""

import re
import warnings

import pytest
import torch
from tests.diffusion.test_ddpo_inputs import redness, trainer
from tests.loss_scale import with_loss_scale

from trimtab_common.health import TrainingDivergedError


def said(ddpo, *, epochs):
    """Returns the first warning about each condition in some epochs."""
    texts = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(epochs):
            ddpo.step(epoch, ddpo.global_step)
    for warning in caught:
        if found := re.search(r"\w+ \d+: health/(\w+): (.*)", str(warning.message)):
            texts.setdefault(found[1], found[2])
    return texts


def test_a_constant_reward():
    texts = said(trainer(lambda images, *_: torch.ones(len(images))), epochs=10)
    assert "at each of the last 10 checks: there is nothing to learn from" in texts["constant_rewards"]


def test_rewards_of_a_million_where_nothing_scales_them():
    def huge(*arguments):
        return 1e6 * redness(*arguments)

    assert "a smaller rwr_beta" in said(trainer(huge, estimator="rwr"), epochs=1)["reward_scale"]
    assert not said(trainer(huge, train_learning_rate=1e-5), epochs=1)


def test_a_reference_that_is_not_the_policy_at_the_start():
    ddpo = trainer(init_kl_coef=0.1)
    with torch.no_grad():
        for weight in ddpo.model.parameters():
            weight.mul_(1.1)
    assert "the reference is not the policy at the start" in said(ddpo, epochs=1)["other_reference"]


def test_a_kl_that_runs_away_and_a_coefficient_that_winds_up():
    settings = {"init_kl_coef": 1e-6, "adap_kl_ctrl": True, "target": 1e-4, "horizon": 4.0, "train_clip_range": 1.0}
    texts = said(trainer(train_learning_rate=1e-2, **settings), epochs=16)
    assert re.search(r"above 0.0005 \(5 times the target\)", texts["runaway_kl"])
    assert "(10 times the first), and KL to the reference" in texts["kl_coef_winds_up"]


def test_an_image_that_is_not_finite(monkeypatch):
    ddpo = trainer()
    decode = ddpo.sd_pipeline.sd_pipeline.vae.decode
    calls = []

    def broken(*arguments, **options):
        output = decode(*arguments, **options)
        calls.append(output)
        images = output[0]
        images[1] = torch.nan
        return output

    monkeypatch.setattr(ddpo.sd_pipeline.sd_pipeline.vae, "decode", broken)
    before = torch.cat([weight.flatten() for weight in ddpo.model.parameters()]).detach().clone()
    with pytest.raises(TrainingDivergedError, match=r"the pixels of image 1 \(1 of 2\) are not finite. No update"):
        ddpo.step(0, 0)
    assert calls
    assert torch.equal(torch.cat([weight.flatten() for weight in ddpo.model.parameters()]), before)


def test_gradients_that_overflow_skip_the_update_and_lower_the_scale(monkeypatch):
    ddpo = trainer(train_gradient_accumulation_steps=1)
    scaler = with_loss_scale(ddpo, 1024.0, monkeypatch)
    broken = next(weight for weight in ddpo.model.parameters() if weight.requires_grad)
    handle = broken.register_hook(lambda gradient: gradient * torch.inf)
    before = torch.cat([weight.flatten() for weight in ddpo.model.parameters()]).detach().clone()
    ddpo.step(0, 0)
    assert torch.equal(torch.cat([weight.flatten() for weight in ddpo.model.parameters()]), before)
    assert scaler.get_scale() < 1024
    assert ddpo.last_stats["policy/overflowed"] == 1
    assert "grad_norm" not in ddpo.last_stats
    handle.remove()
    ddpo.step(1, ddpo.global_step)
    assert not torch.equal(torch.cat([weight.flatten() for weight in ddpo.model.parameters()]), before)
    assert ddpo.last_stats["policy/overflowed"] == 0


def test_gradients_that_overflow_at_every_scale_end_the_run(monkeypatch):
    ddpo = trainer(train_gradient_accumulation_steps=1)
    scaler = with_loss_scale(ddpo, 2.0, monkeypatch)
    for weight in ddpo.model.parameters():
        weight.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(TrainingDivergedError, match=r"lowered the loss scale to 0\.5: nothing trains.*bf16"):
        ddpo.step(0, 0)
    assert scaler.get_scale() == 0.5
