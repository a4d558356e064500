"""Compares a Gaussian denoising step with torch.distributions, diffusers' own steps and the papers' formulas."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from tests.diffusion import tiny
from torch.distributions import Normal, kl_divergence

from trimtab_diffusion.steps import ScheduleError, Steps, ddim_gaussian, flow_gaussian, gaussian_kl, gaussian_logprob

SHAPE = (3, 4, 8, 8)
SPACINGS = ("leading", "trailing", "linspace")


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape or SHAPE, generator=tiny.generator(seed), dtype=torch.float64).to(dtype)


def ddim(count: int, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    """Returns Stable Diffusion's DDIM, with tables exact to `dtype`, set to `count` steps."""
    scheduler = tiny.ddim(**settings)
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.to(dtype)
    scheduler.final_alpha_cumprod = scheduler.final_alpha_cumprod.to(dtype)
    scheduler.set_timesteps(count)
    return scheduler


def flow(count: int, shift: float = 3.0) -> FlowMatchEulerDiscreteScheduler:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(count)
    return scheduler


def every(steps: Steps) -> torch.Tensor:
    return torch.arange(len(steps))


def assert_is_stock_step(scheduler: Any, eta: float, atol: float, dtype: torch.dtype = torch.float64) -> None:
    """Asserts that stock samples are mean + deviation * noise in every step, for the noise that stock receives."""
    steps = Steps.of(scheduler, eta)
    output, sample, drawn = (noise(seed=seed, dtype=dtype) for seed in range(3))
    for index, timestep in enumerate(scheduler.timesteps):
        mean, std = steps.gaussian(output, sample, torch.full((len(sample),), index))
        stock = scheduler.step(output, timestep, sample, eta=eta, variance_noise=drawn).prev_sample
        assert stock.isfinite().all()
        torch.testing.assert_close(mean + std.view(-1, 1, 1, 1) * drawn, stock, atol=atol, rtol=atol)
        still = scheduler.step(output, timestep, sample, eta=eta, variance_noise=0 * drawn).prev_sample
        torch.testing.assert_close(mean, still, atol=atol, rtol=atol)


# Densities


def test_logprob_is_the_normals_mean_over_dimensions():
    x, mean, std = noise(seed=0), noise(seed=1), torch.tensor([0.02, 0.5, 3.0], dtype=torch.float64)
    expected = Normal(mean, std.view(-1, 1, 1, 1)).log_prob(x).flatten(1).mean(1)
    torch.testing.assert_close(gaussian_logprob(x, mean, std), expected, atol=1e-12, rtol=1e-12)


def test_logprob_pulls_the_mean_towards_what_was_drawn():
    x, mean, std = noise(seed=0), noise(seed=1).requires_grad_(), torch.tensor([0.02, 0.5, 3.0], dtype=torch.float64)
    gaussian_logprob(x, mean, std).sum().backward()
    expected = (x - mean.detach()) / std.view(-1, 1, 1, 1) ** 2 / x[0].numel()
    torch.testing.assert_close(mean.grad, expected)


def test_kl_is_the_normals_mean_over_dimensions():
    mean, reference, std = noise(seed=0), noise(seed=1), torch.tensor([0.02, 0.5, 3.0], dtype=torch.float64)
    sigma = std.view(-1, 1, 1, 1)
    expected = kl_divergence(Normal(mean, sigma), Normal(reference, sigma)).flatten(1).mean(1)
    torch.testing.assert_close(gaussian_kl(mean, reference, std), expected)
    assert gaussian_kl(mean, mean, std).eq(0).all()


def test_kl_is_the_expected_log_ratio():
    """Over 2e5 samples; the log-ratio deviates by |gap| / std = 0.5, so its mean is known to 0.0011."""
    mean, reference, std = torch.zeros(1, 1), torch.full((1, 1), 0.1), torch.tensor([0.2])
    draws = mean + 0.2 * noise(200_000, 1, dtype=torch.float32)
    ratio = gaussian_logprob(draws, mean, std) - gaussian_logprob(draws, reference, std)
    assert float(ratio.mean()) == pytest.approx(float(gaussian_kl(mean, reference, std)), abs=0.005)


# DDIM


@pytest.mark.parametrize("eta", [0.5, 1.0])
@pytest.mark.parametrize("to_one", [True, False])
@pytest.mark.parametrize("spacing", SPACINGS)
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_ddim_is_the_stock_step(prediction: str, spacing: str, to_one: bool, eta: float):
    # 7 does not divide 1000: stock then goes to t - 142 even if that is not the next timestep.
    scheduler = ddim(7, prediction_type=prediction, timestep_spacing=spacing, set_alpha_to_one=to_one)
    assert_is_stock_step(scheduler, eta, atol=1e-9)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_ddim_is_the_stock_step_in_float32(prediction: str):
    scheduler = ddim(10, torch.float32, prediction_type=prediction)
    assert_is_stock_step(scheduler, 1.0, atol=5e-5, dtype=torch.float32)


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_sample": True},
        {"clip_sample": True, "clip_sample_range": 0.3},
    ],
)
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_ddim_clips_as_stock_does(prediction: str, settings: dict[str, Any]):
    scheduler = ddim(5, prediction_type=prediction, **settings)
    assert_is_stock_step(scheduler, 0.7, atol=1e-9)
    sample, output, index = noise(seed=1), noise(), torch.full((3,), 2)
    free, _ = Steps.of(ddim(5, prediction_type=prediction), 0.7).gaussian(output, sample, index)
    bound, _ = Steps.of(scheduler, 0.7).gaussian(output, sample, index)
    assert not torch.allclose(free, bound, atol=1e-2), "the settings change nothing: this test cannot fail"


def test_dynamic_thresholding_is_refused():
    with pytest.raises(ScheduleError, match=r"thresholding=True, .* thresholding=False\)"):
        Steps.of(ddim(5, thresholding=True), 1.0)


def test_ddim_reaches_its_start_in_closed_form():
    """If the output is the true noise, x stays on the forward process for any deviation: both moments are known."""
    alpha, alpha_next = torch.tensor([0.2]).double(), torch.tensor([0.6]).double()
    x0, true = noise(1, 5), noise(1, 5, seed=1)
    x = alpha.sqrt() * x0 + (1 - alpha).sqrt() * true
    for eta in (0.0, 0.3, 1.0):
        mean, std = ddim_gaussian(true, x, alpha=alpha, alpha_next=alpha_next, eta=eta, prediction_type="epsilon")
        kept = (mean - alpha_next.sqrt() * x0) / true  # share of the old noise that is left
        torch.testing.assert_close(kept**2 + std**2, (1 - alpha_next).expand_as(kept))


def test_eta_1_has_the_deviation_of_ddpm():
    """The deviation is beta tilde of Ho et al. 2020 (arXiv:2006.11239, Eq. 7), for one step of the thousand."""
    steps = Steps.of(ddim(1000, steps_offset=0), 1.0)
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64).square()
    bar = (1 - betas).cumprod(0)
    expected = (betas[1:] * (1 - bar[:-1]) / (1 - bar[1:])).sqrt()
    _, std = steps.gaussian(*[torch.zeros(1000, 1).double()] * 2, every(steps))
    torch.testing.assert_close(std[:-1].flip(0), expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "last"),
    [
        ({"timestep_spacing": "leading", "steps_offset": 1}, 0.0206),
        ({"timestep_spacing": "leading", "steps_offset": 1, "set_alpha_to_one": True}, 0.0),
        ({"timestep_spacing": "leading", "steps_offset": 0}, 0.0),
        ({"timestep_spacing": "linspace"}, 0.0),
        ({"timestep_spacing": "trailing"}, 0.0290),
        ({"timestep_spacing": "trailing", "set_alpha_to_one": True}, 0.0),
    ],
)
def test_only_the_last_step_may_have_no_deviation(settings: dict[str, Any], last: float):
    steps = Steps.of(ddim(10, torch.float32, **settings), 1.0)
    _, std = steps.gaussian(*[torch.zeros(10, 1)] * 2, every(steps))
    assert float(std[-1]) == pytest.approx(last, abs=2e-4)
    assert std[:-1].gt(0.02).all()
    assert steps.is_random.tolist() == [True] * 9 + [last > 0]


def test_without_noise_no_step_is_random():
    assert not Steps.of(ddim(5), 0.0).is_random.any()
    assert not Steps.of(flow(5), 0.0).is_random.any()


@pytest.mark.parametrize("eta", [0.5, 1.0])
def test_zero_terminal_snr_is_the_stock_step_for_v(eta: float):
    scheduler = ddim(5, prediction_type="v_prediction", timestep_spacing="trailing", rescale_betas_zero_snr=True)
    steps = Steps.of(scheduler, eta)
    assert steps.before[0] == 0
    output, sample = noise(), noise(seed=1)
    mean, std = steps.gaussian(output, sample, torch.zeros(3, dtype=torch.int64))
    # x is pure noise: x_0 is -v, the old noise is x, and the new deviation is eta times the whole.
    after = steps.after[0]
    old = ((1 - after) * (1 - eta**2)) ** 0.5
    torch.testing.assert_close(mean, -(after**0.5) * output + old * sample, atol=1e-7, rtol=1e-7)
    torch.testing.assert_close(std, (eta * (1 - after) ** 0.5).expand(3))
    if eta < 1:  # at 1 stock takes the root of a number that rounds to just below zero
        assert_is_stock_step(scheduler, eta, atol=1e-9)


def test_zero_terminal_snr_is_refused_for_epsilon():
    settings = {"timestep_spacing": "trailing", "rescale_betas_zero_snr": True}
    with pytest.raises(ValueError, match="rescale_betas_zero_snr=False"):
        Steps.of(ddim(5, **settings), 1.0)
    Steps.of(ddim(5, **settings | {"timestep_spacing": "leading"}), 1.0)  # begins later, with some signal


@pytest.mark.parametrize("eta", [-0.1, 1.1])
def test_ddim_refuses_eta_beyond_0_to_1(eta: float):
    with pytest.raises(ValueError, match=f"eta={eta}"):
        Steps.of(ddim(5), eta)


def test_flow_refuses_only_negative_eta():
    with pytest.raises(ValueError, match=r"eta=-0\.1"):
        Steps.of(flow(5), -0.1)
    assert Steps.of(flow(5), 1.1).is_random.all()


def test_unknown_predictions_are_refused():
    alpha = torch.tensor([0.5])
    with pytest.raises(ValueError, match=r"'flow' is unknown. Use epsilon, sample or v_prediction"):
        ddim_gaussian(noise(1, 2), noise(1, 2), alpha=alpha, alpha_next=alpha, eta=1.0, prediction_type="flow")


# Flows


def test_flow_is_an_euler_maruyama_step_of_the_papers_sde():
    """Flow-GRPO, Eqs. 8 and 9, in plain numbers: the drift is v + s^2/(2t) (x + (1-t) v), for dt < 0."""
    scheduler, eta = flow(6), 0.7
    steps = Steps.of(scheduler, eta)
    sigmas = scheduler.sigmas.double().tolist()
    velocity, x = noise(6, 5), noise(6, 5, seed=1)
    mean, std = steps.gaussian(velocity, x, every(steps))
    for row, (t, t_next) in enumerate(pairwise(sigmas)):
        s = eta * math.sqrt(t / (1 - (sigmas[1] if row == 0 else t)))
        dt = t - t_next
        expected = x[row] - dt * velocity[row] - dt * s**2 / (2 * t) * (x[row] + (1 - t) * velocity[row])
        torch.testing.assert_close(mean[row], expected, atol=1e-6, rtol=1e-6)
        assert float(std[row]) == pytest.approx(s * math.sqrt(dt), rel=1e-6)
    assert sigmas[0] == 1
    assert sigmas[-1] == 0
    assert steps.is_random.all(), "the last step must also be random"


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_without_noise_is_the_stock_step(shift: float):
    scheduler = flow(6, shift)
    steps = Steps.of(scheduler, 0.0)
    velocity, sample = (noise(seed=seed, dtype=torch.float32) for seed in range(2))
    for index, timestep in enumerate(scheduler.timesteps):
        mean, std = steps.gaussian(velocity, sample, torch.full((3,), index))
        stock = scheduler.step(velocity, timestep, sample).prev_sample
        torch.testing.assert_close(mean, stock, atol=1e-6, rtol=1e-6)
        assert std.eq(0).all()
        sample = stock
    barely = Steps.of(scheduler, 1e-4).gaussian(velocity, sample, torch.arange(3))[0]
    torch.testing.assert_close(barely, steps.gaussian(velocity, sample, torch.arange(3))[0], atol=1e-6, rtol=1e-6)


def variance_gap(count: int, eta: float) -> float:
    """Returns how far the variance of x strays from the flow's marginal, over `count` steps from t = 0.9 to 0.

    With data N(1, 0.25) and noise N(0, 1) all is Gaussian: the velocity E[noise - data | x] is linear, and a step maps
    mean and variance to mean and variance without sampling.
    """
    data_mean, data_var = 1.0, 0.25
    sigmas = torch.linspace(0.9, 0, count + 1, dtype=torch.float64)
    t = float(sigmas[0])
    mean, var, worst = (1 - t) * data_mean, (1 - t) ** 2 * data_var + t**2, 0.0
    for t, t_next in pairwise(sigmas.tolist()):
        marginal = (1 - t) ** 2 * data_var + t**2
        x = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
        velocity = (t - (1 - t) * data_var) / marginal * (x - (1 - t) * data_mean) - data_mean
        (shift, end), std = flow_gaussian(
            velocity,
            x,
            sigma=torch.tensor([t] * 2).double(),
            sigma_next=torch.tensor([t_next] * 2).double(),
            sigma_second=0.5,
            eta=eta,
        )
        slope = float(end - shift)
        mean, var = float(shift) + slope * mean, slope**2 * var + float(std[0]) ** 2
        gaps = (mean - (1 - t_next) * data_mean, var - (1 - t_next) ** 2 * data_var - t_next**2)
        worst = max(worst, *map(abs, gaps))
    return worst


@pytest.mark.parametrize("eta", [0.0, 0.3, 0.7, 1.5])
def test_flow_keeps_the_marginals_of_the_flow(eta: float):
    """Holds for any noise, up to the first-order error of Euler's method."""
    coarse, fine = variance_gap(200, eta), variance_gap(400, eta)
    assert fine < 0.02
    assert fine < 0.6 * coarse


# Tables


@pytest.mark.parametrize("scheduler", [ddim(5), ddim(5, prediction_type="v_prediction", clip_sample=True), flow(5)])
def test_rows_of_a_batch_may_be_at_different_steps(scheduler: Any):
    steps = Steps.of(scheduler, 0.8)
    index = torch.tensor([3, 0, 4, 0, 2])
    output, sample, following = (noise(5, 4, 8, 8, seed=seed) for seed in range(3))
    mean, std = steps.gaussian(output, sample, index)
    logprob = gaussian_logprob(following, mean, std)
    assert std.shape == logprob.shape == (5,)
    for row in range(5):
        one = slice(row, row + 1)
        alone = steps.gaussian(output[one], sample[one], index[one])
        torch.testing.assert_close((mean[one], std[one]), alone, atol=1e-12, rtol=1e-12)
        expected = Normal(alone[0], alone[1].view(1, 1, 1, 1)).log_prob(following[one]).mean()
        assert float(logprob[row]) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheduler", [ddim(4, torch.float32), ddim(4, torch.float32, clip_sample=True), flow(4)])
def test_half_precision_is_computed_in_float32(scheduler: Any, dtype: torch.dtype):
    steps = Steps.of(scheduler, 1.0)
    index = torch.tensor([2, 0, 3])
    output, sample, following = (noise(seed=seed, dtype=dtype) for seed in range(3))
    widened = [x.float() for x in (output, sample, following)]
    half, full = steps.gaussian(output, sample, index), steps.gaussian(*widened[:2], index)
    for got, expected in zip(
        (*half, gaussian_logprob(following, *half)), (*full, gaussian_logprob(widened[2], *full)), strict=True
    ):
        assert got.dtype == torch.float32
        assert torch.equal(got, expected)


@pytest.mark.parametrize("density", [gaussian_logprob, gaussian_kl])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_densities_of_half_precision_are_computed_in_float32(dtype: torch.dtype, density: Any):
    mean, other, std = noise(dtype=dtype), noise(seed=1, dtype=dtype), torch.tensor([0.02, 0.5, 3.0])
    got = density(mean, other, std)
    assert got.dtype == torch.float32
    assert torch.equal(got, density(mean.float(), other.float(), std))


@pytest.mark.parametrize("scheduler", [ddim(5), flow(5)])
def test_index_of_finds_steps(scheduler: Any):
    steps = Steps.of(scheduler, 1.0)
    index = torch.tensor([4, 0, 0, 2])
    assert len(steps) == 5
    assert steps.index_of(scheduler.timesteps[index]).tolist() == index.tolist()
    unknown = scheduler.timesteps[index] + 3
    unknown[1] = scheduler.timesteps[0]
    with pytest.raises(ValueError, match="Use those of the schedule") as error:
        steps.index_of(unknown)
    assert str(unknown[[0, 2, 3]].tolist()) in str(error.value)
    assert str(scheduler.timesteps.tolist()) in str(error.value)
