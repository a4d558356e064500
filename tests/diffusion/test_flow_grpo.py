"""Flow-GRPO (arXiv:2505.05470): the paper's formulas, and numbers of its released code.

The numbers under RELEASED are what `sde_step_with_logprob` and the lines of the training loop after it gave for the
inputs below: github.com/yifan123/flow_grpo, commit ac4c86e, flow_grpo/diffusers_patch/sd3_sde_with_logprob.py and
scripts/train_sd3.py, called once by hand, in float32. Only the numbers were taken over.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from tests.diffusion import tiny
from tests.diffusion.run_ddpo_distributed import trainer
from torch import Tensor

from trimtab_common.formulas.surrogate import clipped_ratio
from trimtab_diffusion.steps import Steps, gaussian_kl, gaussian_logprob
from trimtab_diffusion.trajectories import sampled_pairs

NOISE_LEVEL, CLIP = 0.7, 5e-4
INDEX = torch.tensor([0, 4, 8])
ADVANTAGES = torch.tensor([1.5, -0.5, 0.75])
RELEASED = {
    "old_logprobs": [-0.60254592, -0.073915958, -0.11796305],
    "logprobs": [-0.60253412, -0.07316187, -0.12051201],
    "ratio": [1.0000118, 1.0007544, 0.99745429],
    "loss": [-1.5000176, 0.50037718, -0.74809074],
    "kl": [1.4988571e-07, 1.765703e-06, 8.3329761e-04],
    "std_dev_t": [3.5056713, 1.3592027, 0.43441477],
    "dt": [0.039870679, 0.083089769, 0.26912022],
    "mean": [-0.039870679, 0.99003768, -0.53112984],
}


def schedule(count: int = 10, shift: float = 3.0) -> Steps:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(count)
    return Steps.of(scheduler, NOISE_LEVEL)


def ours() -> dict[str, Tensor]:
    """Returns our numbers for the same inputs; `kl` is that of the step's two Gaussians."""
    steps, n = schedule(), torch.arange(24.0).view(3, 2, 2, 2)
    latents, following = n.sin(), 0.9 * n.sin() + 0.2 * (7 * n).sin()
    old = (2 * n).cos()
    new, ref = old + 0.03 * (5 * n).sin(), old - 0.05 * (3 * n).cos()
    (old_mean, std), (mean, _), (ref_mean, _) = (steps.gaussian(each, latents, INDEX) for each in (old, new, ref))
    old_logprobs, logprobs = (gaussian_logprob(following, each, std) for each in (old_mean, mean))
    ratio = (logprobs - old_logprobs).exp()
    return {
        "old_logprobs": old_logprobs,
        "logprobs": logprobs,
        "ratio": ratio,
        "loss": clipped_ratio(ratio, ADVANTAGES, clip_low=CLIP, clip_high=CLIP),
        "kl": gaussian_kl(mean, ref_mean, std),
        "std": std,
        "mean": mean[:, 0, 0, 0],
    }


def test_one_step_has_the_numbers_of_the_released_code():
    numbers, released = ours(), {name: torch.tensor(values) for name, values in RELEASED.items()}
    for name in ("old_logprobs", "logprobs", "ratio", "loss", "mean"):
        torch.testing.assert_close(numbers[name], released[name], rtol=1e-5, atol=1e-6)
    dt = released["dt"]
    torch.testing.assert_close(numbers["std"], released["std_dev_t"] * dt.sqrt(), rtol=1e-5, atol=1e-6)
    # It divides by the noise of a unit of time, not by that of the step: its KL is the Gaussians' times the step's
    # length. In float32 the first ones, 1e-7, are differences of nearly equal means.
    torch.testing.assert_close(dt * numbers["kl"], released["kl"], rtol=1e-3, atol=1e-9)


def test_kl_of_a_step_is_the_papers_in_velocities():
    """KL = dt / 2 (s (1 - t) / (2 t) + 1 / s)^2 |v - v_ref|^2 with s = a sqrt(t / (1 - t))."""
    steps = schedule(8, shift=2.0)
    index = torch.arange(1, 8)  # at t = 1 the paper's s is infinite
    x, v, v_ref = (torch.randn(7, 3, 4, generator=tiny.generator(seed), dtype=torch.float64) for seed in range(3))
    (mean, std), (ref_mean, _) = (steps.gaussian(each, x, index) for each in (v, v_ref))
    t, dt = steps.before[index].double(), (steps.before - steps.after)[index].double()
    s = NOISE_LEVEL * (t / (1 - t)).sqrt()
    expected = dt / 2 * (s * (1 - t) / (2 * t) + 1 / s) ** 2 * (v - v_ref).square().mean((1, 2))
    torch.testing.assert_close(gaussian_kl(mean, ref_mean, std), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_lengths_of_steps_add_up_to_one(shift: float):
    """So init_kl_coef = beta / T weighs the KL of T steps, in all, as the released code's beta does."""
    steps = schedule(10, shift)
    assert float((steps.before - steps.after).sum()) == pytest.approx(1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_guided", [True, False])
def test_the_recipes_loss_is_the_sum_of_its_parts(is_guided: bool, tmp_path: Path):
    """A whole step of the recipe on an SD3-type pipeline, against the formulas written out for the transformer."""
    scale = 4.5 if is_guided else 1.0
    settings: dict[str, Any] = {"sample_num_steps": 6, "sample_window": 5, "sample_window_interval": 0}
    settings |= {"sample_guidance_scale": scale, "sample_eta": NOISE_LEVEL, "group_size": 2, "scale_rewards": "batch"}
    ddpo = trainer(str(tmp_path), kind="sd3", init_kl_coef=0.04, train_clip_range=1e-4, **settings)
    samples = ddpo.draw(0)
    path = samples.trajectories
    assert path.schedule.steps.is_random.tolist() == [True] * 5 + [False]
    with torch.no_grad():
        for weight in ddpo.sd_pipeline.denoiser.parameters():
            weight += 1e-3 * torch.randn(weight.shape, generator=tiny.generator(4))
    rows, index = torch.arange(3), torch.tensor([0, 2, 4])
    pairs = sampled_pairs(path, torch.device("cpu"), rows, index)
    sigmas = ddpo.sd_pipeline.scheduler.sigmas.double()
    means = []
    with torch.no_grad(), ddpo.reference() as frozen:
        for model in (ddpo.sd_pipeline.denoiser, frozen):
            repeats = 2 if is_guided else 1
            output = model(
                torch.cat([pairs.latents] * repeats),
                timestep=1000 * sigmas[index].float().repeat(repeats),
                encoder_hidden_states=pairs.conditions["encoder_hidden_states"],
                pooled_projections=pairs.conditions["pooled_projections"],
            ).sample.double()
            plain, prompted = (output[:3], output[3:]) if is_guided else (output, output)
            v, x = plain + scale * (prompted - plain), pairs.latents.double()
            t, dt = sigmas[index].view(-1, 1, 1, 1), (sigmas[index + 1] - sigmas[index]).view(-1, 1, 1, 1)
            s = NOISE_LEVEL * (t / (1 - torch.where(t == 1, sigmas[1], t))).sqrt()
            means.append(x + (v + s**2 / (2 * t) * (x + (1 - t) * v)) * dt)
        losses = ddpo.calculate_loss(
            pairs.latents, pairs.timesteps, pairs.next_latents, pairs.logprobs, ADVANTAGES, pairs.conditions
        )
    std = s * (-dt).sqrt()
    logprobs = -((pairs.next_latents - means[0]) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
    ratio = (logprobs.mean((1, 2, 3)) - pairs.logprobs).exp()
    assert (ratio - 1).abs().max() > 1e-4, "the clip is not reached"
    surrogate = torch.maximum(-ADVANTAGES * ratio, -ADVANTAGES * ratio.clamp(1 - 1e-4, 1 + 1e-4)).mean()
    kl = ((means[0] - means[1]) ** 2 / (2 * std**2)).mean()
    assert float(losses[0]) == pytest.approx(float(surrogate + 0.04 * kl), abs=1e-6)
