"""MixGRPO's window: its steps are random and train, the others are deterministic (arXiv:2507.21802)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.diffusion import tiny
from tests.diffusion.run_ddpo_distributed import trainer, weights

from trimtab_diffusion import DDPOConfig, DDPOStableDiffusionPipeline
from trimtab_diffusion.ddpo.algorithm import window_of
from trimtab_diffusion.steps import Steps

STEPS = 6
BUILD = {"sd": tiny.stable_diffusion, "sd3": tiny.stable_diffusion_3}
SIZES: dict[str, Any] = {"sample_num_steps": STEPS, "sample_window": 2, "sample_window_interval": 1}


def sampled(kind: str, **settings: Any) -> Any:
    pipeline = DDPOStableDiffusionPipeline(BUILD[kind]())
    call = {"num_inference_steps": STEPS, "guidance_scale": 3.0, "output_type": "latent"}
    return pipeline(["a cat", "a dog"], eta=0.7, generator=tiny.generator(), **call, **settings).trajectories


def test_the_window_moves_by_a_step_and_begins_again():
    config = DDPOConfig(sample_num_steps=6, sample_window=4, sample_window_interval=2, mixed_precision="no")
    assert [window_of(config, epoch) for epoch in range(8)] == [
        *[(0, 4)] * 2,
        *[(1, 5)] * 2,
        *[(2, 6)] * 2,
        *[(0, 4)] * 2,
    ]
    still = DDPOConfig(sample_num_steps=6, sample_window=5, sample_window_interval=0, mixed_precision="no")
    assert [window_of(still, epoch) for epoch in (0, 1, 40)] == [(0, 5)] * 3
    assert window_of(DDPOConfig(mixed_precision="no"), 3) is None


@pytest.mark.parametrize("kind", BUILD)
def test_a_window_does_not_round_the_noise_of_latents_in_half_precision(kind: str):
    scheduler = BUILD[kind]().scheduler
    scheduler.set_timesteps(STEPS)
    latents, index = torch.ones(STEPS, 2, dtype=torch.bfloat16), torch.arange(STEPS)
    whole, windowed = (Steps.of(scheduler, 0.7, window).gaussian(latents, latents, index) for window in (None, (2, 4)))
    for all_steps, inside in zip(whole, windowed, strict=True):
        assert torch.equal(inside[2:4], all_steps[2:4])


@pytest.mark.parametrize("kind", BUILD)
def test_steps_outside_the_window_are_deterministic(kind: str):
    path = sampled(kind, window=(2, 4))
    steps = path.schedule.steps
    assert steps.is_random.tolist() == [False, False, True, True, False, False]
    assert path.logprobs.ne(0).tolist() == [steps.is_random.tolist()] * 2
    pipeline = BUILD[kind]()
    pipeline.scheduler.set_timesteps(STEPS)
    for number in (0, 1, 4, 5):  # diffusers' own step without noise
        index = torch.full((2,), number)
        before = path.first if number == 0 else path.latents[:, number - 1]
        conditions = {
            name: leaf[:, 0].transpose(0, 1).flatten(0, 1)
            for name, leaf in path.conditions.items()
            if isinstance(leaf, torch.Tensor)
        }
        with torch.no_grad():
            output = path.schedule.ask(
                pipeline.components[("unet", "transformer")[kind == "sd3"]], before, index, conditions
            )
        time = pipeline.scheduler.timesteps[number]
        if kind == "sd":
            expected = pipeline.scheduler.step(output, time, before, eta=0.0).prev_sample
        else:
            pipeline.scheduler._step_index = number
            expected = pipeline.scheduler.step(output, time, before).prev_sample
        torch.testing.assert_close(path.latents[:, number], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", BUILD)
def test_a_window_of_all_steps_is_none(kind: str):
    whole, plain = sampled(kind, window=(0, STEPS)), sampled(kind)
    assert torch.equal(whole.latents, plain.latents)
    assert torch.equal(whole.logprobs, plain.logprobs)


@pytest.mark.filterwarnings("error:.*steps have no noise")
@pytest.mark.parametrize("kind", BUILD)
def test_the_window_alone_trains(kind: str, tmp_path: Path):
    ddpo = trainer(str(tmp_path), kind=kind, init_kl_coef=0.1, **SIZES)
    usual, seen = ddpo.calculate_loss, []

    def calculate_loss(latents: Any, timesteps: Any, *rest: Any) -> Any:
        seen.append(timesteps)
        return usual(latents, timesteps, *rest)

    ddpo.calculate_loss = calculate_loss
    before = weights(ddpo)
    for epoch in range(2):
        seen.clear()
        ddpo.step(epoch, ddpo.global_step)
        times = ddpo.sd_pipeline.schedule.steps.timesteps
        assert set(torch.cat(seen).tolist()) == set(times[epoch : epoch + 2].tolist())
        assert sum(map(len, seen)) == 8 * 2
    assert ddpo.last_stats["ratio"] == pytest.approx(1, abs=0.05)
    assert any(not torch.equal(weight, before[name]) for name, weight in weights(ddpo).items())


def test_a_window_larger_than_the_schedule_is_refused():
    with pytest.raises(ValueError, match="sample_window=7 is more than sample_num_steps=6"):
        DDPOConfig(sample_num_steps=6, sample_window=7, mixed_precision="no")


def test_a_window_that_will_leave_the_noise_is_refused_before_sampling(tmp_path: Path):
    pipeline = tiny.stable_diffusion(scheduler=tiny.ddim(set_alpha_to_one=True))  # the last step has no noise
    ddpo = trainer(str(tmp_path), pipeline, **SIZES | {"sample_window": 1, "num_epochs": 6})
    ddpo.draw = lambda epoch: pytest.fail("images were sampled")
    with pytest.raises(ValueError, match=r"would move to step 6 of 6.*Set sample_window=2 or more"):
        ddpo.step(0, 0)
    for settings in (
        {"sample_window": 2, "num_epochs": 6},
        {"sample_window": 1, "sample_window_interval": 0, "num_epochs": 6},
        {"sample_window": 1, "num_epochs": 5},  # the window stays before the last step
    ):
        allowed = trainer(str(tmp_path), pipeline, **SIZES | settings)
        assert allowed.step(0, 0) == 1


@pytest.mark.parametrize(("fraction", "count"), [(1.0, 2), (0.5, 2), (0.2, 1)])
def test_at_most_the_steps_of_the_window_train(fraction: float, count: int, tmp_path: Path):
    ddpo, seen = trainer(str(tmp_path), train_timestep_fraction=fraction, **SIZES), []
    usual = ddpo.calculate_loss
    ddpo.calculate_loss = lambda latents, times, *rest: (seen.extend(times), usual(latents, times, *rest))[1]
    ddpo.step(0, 0)
    assert ddpo.num_train_timesteps == count
    assert len(seen) == 8 * count
