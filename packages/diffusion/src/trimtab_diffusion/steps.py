"""One denoising step as a Gaussian: mean, standard deviation, log-probability, in float32 or more."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from trimtab_common.accelerators import moved


class ScheduleError(ValueError):
    """A scheduler's steps cannot be taken, or nothing can be trained on them, with these settings."""


class Scheduler(Protocol):
    """A diffusers scheduler. DDIM has alphas, flow matching has sigmas."""

    config: Any
    timesteps: Tensor
    num_inference_steps: int
    alphas_cumprod: Tensor
    final_alpha_cumprod: Tensor
    sigmas: Tensor

    def set_timesteps(self, num_inference_steps: int) -> None: ...
    @classmethod
    def from_config(cls, config: Any) -> Any: ...


def gaussian_logprob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Returns log N(x; mean, std^2 I) per dimension: the mean over all dimensions except the first.

    DDPO's ratio uses this mean, not the sum: the clip range of 1e-4 of Black et al. 2023 (arXiv:2305.13301) is on this
    scale. The mean times the number of dimensions is the joint log-probability.

    Args:
        x, mean: [B, ...].
        std: [B], positive.

    Returns:
        [B], in nats.
    """
    x, mean = _at_least_float32(x), _at_least_float32(mean)
    sigma = along(std.to(mean.dtype), mean)
    logprob = -0.5 * ((x - mean) / sigma) ** 2 - sigma.log() - 0.5 * math.log(2 * math.pi)
    return logprob.flatten(1).mean(1)


def gaussian_kl(mean: Tensor, ref_mean: Tensor, std: Tensor) -> Tensor:
    """Returns KL(N(mean, std^2 I), N(ref_mean, std^2 I)) = |mean - ref_mean|^2 / (2 std^2) per dimension.

    Args:
        mean, ref_mean: [B, ...].
        std: [B], positive.

    Returns:
        [B], in nats, a mean over dimensions as in `gaussian_logprob`.
    """
    mean, ref_mean = _at_least_float32(mean), _at_least_float32(ref_mean)
    sigma = along(std.to(mean.dtype), mean)
    return (0.5 * ((mean - ref_mean) / sigma) ** 2).flatten(1).mean(1)


def ddim_gaussian(
    model_output: Tensor,
    sample: Tensor,
    *,
    alpha: Tensor,
    alpha_next: Tensor,
    eta: float | Tensor,
    prediction_type: str,
    clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns mean and standard deviation of a DDIM step (Song et al. 2021, arXiv:2010.02502, Eqs. 12 and 16).

    Args:
        model_output, sample: [B, ...], any floating dtype.
        alpha, alpha_next: [B], the products of alphas (the paper's alpha_t, others' bar alpha_t) before and after the
            step.
        eta: 0 is deterministic, 1 has the deviation of DDPM. One number, or [B, 1, ...].
        prediction_type: what the model predicts: epsilon, sample or v_prediction.
        clip: clamps x_0 to [-clip, clip]; None: no clamp.

    Returns:
        Mean [B, ...] and standard deviation [B].

    Raises:
        ValueError: prediction_type is unknown.
    """
    output, x = _at_least_float32(model_output), _at_least_float32(sample)
    a, a_next = along(alpha.to(x.dtype), x), along(alpha_next.to(x.dtype), x)
    x0, epsilon = x0_and_epsilon(output, x, a, prediction_type=prediction_type)
    if clip is not None:
        x0 = x0.clamp(-clip, clip)
    std = eta * ((1 - a_next) / (1 - a) * (1 - a / a_next)).sqrt()
    mean = a_next.sqrt() * x0 + (1 - a_next - std**2).clamp(min=0).sqrt() * epsilon
    return mean, std.flatten()


def x0_and_epsilon(output: Tensor, sample: Tensor, alpha: Tensor, *, prediction_type: str) -> tuple[Tensor, Tensor]:
    """Splits a sample sqrt(alpha) x_0 + sqrt(1 - alpha) epsilon by a model's prediction.

    Args:
        output, sample: [B, ...].
        alpha: [B, 1, ...], as for `ddim_gaussian`.
        prediction_type: what the model predicts: epsilon, sample or v_prediction.

    Returns:
        x_0 and epsilon, both [B, ...].

    Raises:
        ValueError: prediction_type is unknown.
    """
    signal, deviation = alpha.sqrt(), (1 - alpha).sqrt()
    if prediction_type == "epsilon":
        return (sample - deviation * output) / signal, output
    if prediction_type == "sample":
        return output, (sample - signal * output) / deviation
    if prediction_type == "v_prediction":
        return signal * sample - deviation * output, signal * output + deviation * sample
    raise ValueError(f"prediction_type={prediction_type!r} is unknown. Use epsilon, sample or v_prediction.")


def flow_gaussian(
    velocity: Tensor, sample: Tensor, *, sigma: Tensor, sigma_next: Tensor, sigma_second: float, eta: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Returns mean and standard deviation of a step of the SDE with a flow's marginals (Flow-GRPO, arXiv:2505.05470).

    The SDE is dx = (v + s^2 / (2 t) (x + (1 - t) v)) dt + s dw with s = eta sqrt(t / (1 - t)) (its Eqs. 8 and 9). The
    step is one Euler-Maruyama step from t = sigma to t = sigma_next. At t = 1, where s would be infinite, s uses the
    second sigma of the schedule instead of t.

    Args:
        velocity, sample: [B, ...], any floating dtype.
        sigma, sigma_next: [B].
        sigma_second: the schedule's second sigma.
        eta: scale of the noise; 0 is deterministic. One number, or [B, 1, ...].

    Returns:
        Mean [B, ...] and standard deviation [B].
    """
    v, x = _at_least_float32(velocity), _at_least_float32(sample)
    t, dt = along(sigma.to(x.dtype), x), along((sigma_next - sigma).to(x.dtype), x)
    s = eta * (t / (1 - torch.where(t >= 1, sigma_second, t))).sqrt()
    drift = v + s**2 / (2 * t) * (x + (1 - t) * v)
    return x + drift * dt, (s * (-dt).sqrt()).flatten()


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def gaussian_sample(mean: Tensor, std: Tensor, generator: torch.Generator | None) -> Tensor:
    """Samples from N(mean, std^2 I).

    Args:
        mean: [B, ...].
        std: [B].
        generator: draws the noise; None: torch's default.

    Returns:
        [B, ...].
    """
    noise = randn_tensor(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
    return mean + along(std, mean) * noise


def along(values: Tensor, like: Tensor) -> Tensor:
    """Returns values [B] as [B, 1, ...], with the dimensions of `like` and on its device."""
    return values.to(like.device).view(-1, *[1] * (like.dim() - 1))


@dataclass(frozen=True)
class Steps:
    """The T steps of a schedule, as tables from which a batch computes steps of any index.

    Args:
        timesteps: [T], those of the scheduler.
        before, after: [T], the products of alphas (DDIM) or the sigmas (flow) before and after each step.
        eta: scale of the noise.
        window: the first step that has noise, and the first one after it that has none; None: all have.
        is_flow: whether the steps follow a flow rather than DDIM.
        prediction_type, clip: DDIM's settings, see `ddim_gaussian`.
    """

    timesteps: Tensor
    before: Tensor
    after: Tensor
    eta: float
    is_flow: bool
    prediction_type: str = "epsilon"
    clip: float | None = None
    window: tuple[int, int] | None = None

    @classmethod
    def of(cls, scheduler: Scheduler, eta: float, window: tuple[int, int] | None = None) -> Steps:
        """Returns the steps of a scheduler after its `set_timesteps`.

        Args:
            scheduler: a DDIMScheduler or a FlowMatchEulerDiscreteScheduler.
            eta: scale of the noise, 0 to 1 for DDIM, 0 or more for a flow.
            window: the steps from the first number to before the second have noise; None: all.

        Raises:
            ScheduleError: eta is out of range, the scheduler is of another kind or has thresholding=True, or its
                schedule divides by 0.
        """
        config, timesteps = scheduler.config, scheduler.timesteps.detach().cpu()
        is_flow = "FlowMatch" in type(scheduler).__name__
        if eta < 0 or (eta > 1 and not is_flow):
            raise ScheduleError(f"eta={eta}: DDIM takes 0 to 1, a flow 0 or more.")
        if is_flow:
            sigmas = scheduler.sigmas.detach().cpu().float()
            if len(timesteps) < 2:
                raise ScheduleError(
                    f"A flow of {len(timesteps)} steps came. Use 2 steps or more: the noise of the first one depends "
                    "on the second sigma."
                )
            return cls(timesteps, sigmas[:-1], sigmas[1:], eta, is_flow=True, window=window)
        if type(scheduler).__name__ != "DDIMScheduler":
            raise ScheduleError(
                f"{type(scheduler).__name__} has no log-probabilities. Use a DDIMScheduler or a "
                "FlowMatchEulerDiscreteScheduler; `pipelines.trainable_scheduler` builds one from others' settings."
            )
        if config.thresholding:
            raise ScheduleError(
                "The scheduler has thresholding=True, which bounds pixels and distorts latents. Turn it off: "
                "pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config, thresholding=False)."
            )
        # As diffusers computes it, also where its spacing gives another timestep than the next one of the list.
        following = timesteps - config.num_train_timesteps // scheduler.num_inference_steps
        alphas = scheduler.alphas_cumprod.cpu()
        after = torch.where(following >= 0, alphas[following.clamp(min=0)], scheduler.final_alpha_cumprod.cpu())
        clip = config.clip_sample_range if config.clip_sample else None
        before = alphas[timesteps]
        if config.prediction_type == "epsilon" and bool((before == 0).any()):
            raise ScheduleError(
                "A schedule that begins with pure noise (rescale_betas_zero_snr) divides by 0 when the model predicts "
                "epsilon. Use a v_prediction model, or rescale_betas_zero_snr=False."
            )
        return cls(timesteps, before, after, eta, False, config.prediction_type, clip, window)

    @classmethod
    def of_training(cls, scheduler: Scheduler) -> Steps:
        """Returns the noise levels on which a pipeline was trained, from which no step is taken.

        Args:
            scheduler: as for `of`.
        """
        fresh = type(scheduler).from_config(scheduler.config)  # before any set_timesteps
        timesteps, is_flow = fresh.timesteps.cpu(), "FlowMatch" in type(scheduler).__name__
        levels = fresh.sigmas.cpu()[: len(timesteps)].float() if is_flow else fresh.alphas_cumprod.cpu()[timesteps]
        kind = "epsilon" if is_flow else scheduler.config.prediction_type
        return cls(timesteps, levels, levels, 0.0, is_flow=is_flow, prediction_type=kind)

    def __len__(self) -> int:
        return len(self.timesteps)

    def gaussian(self, model_output: Tensor, sample: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and standard deviation of the sample after a step.

        Args:
            model_output, sample: [B, ...], the sample before the step.
            index: [B], int64, the step of each row.

        Returns:
            Mean [B, ...] and standard deviation [B].
        """
        before, after = moved([self.before[index.cpu()], self.after[index.cpu()]], sample.device)  # one copy
        eta: float | Tensor = self.eta
        if self.window is not None:
            first, end = self.window
            dtype = torch.promote_types(sample.dtype, torch.float32)  # half precision would round eta
            eta = along(eta * ((first <= index) & (index < end)).to(dtype), sample)
        if self.is_flow:
            second = float(self.before[min(1, len(self) - 1)])
            return flow_gaussian(model_output, sample, sigma=before, sigma_next=after, sigma_second=second, eta=eta)
        return ddim_gaussian(
            model_output,
            sample,
            alpha=before,
            alpha_next=after,
            eta=eta,
            prediction_type=self.prediction_type,
            clip=self.clip,
        )

    def noised(self, x0: Tensor, noise: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the noised x0 from which steps begin, and what the denoiser should predict there.

        DDIM: Ho et al. 2020, arXiv:2006.11239, Eq. 4, and the v of Salimans & Ho 2022, arXiv:2202.00512. Flow: x0 + t v
        with the velocity v = noise - x0.

        Args:
            x0, noise: [B, ...].
            index: [B], the step of each row.

        Returns:
            The noised x0 and the target, both [B, ...], in x0's dtype.
        """
        level = along(self.before[index.cpu()].to(x0.dtype), x0)
        if self.is_flow:
            return x0 + level * (noise - x0), noise - x0
        signal, deviation = level.sqrt(), (1 - level).sqrt()
        targets = {"epsilon": noise, "sample": x0, "v_prediction": signal * noise - deviation * x0}
        return signal * x0 + deviation * noise, targets[self.prediction_type]

    def denoised(self, model_output: Tensor, sample: Tensor, index: Tensor) -> Tensor:
        """Returns the x0 that a model predicts, without clamps: the inverse of `noised` for its target.

        Args:
            model_output, sample: [B, ...], the sample before the step.
            index: [B], the step of each row.

        Returns:
            [B, ...], in float32 or more.
        """
        output, x = _at_least_float32(model_output), _at_least_float32(sample)
        level = along(self.before[index.cpu()].to(x.dtype), x)
        if self.is_flow:
            return x - level * output
        return x0_and_epsilon(output, x, level, prediction_type=self.prediction_type)[0]

    @cached_property
    def is_random(self) -> Tensor:
        """[T], bool: the steps whose standard deviation is positive, which have a log-probability."""
        nothing = torch.zeros(len(self), 1, dtype=torch.float64)
        _, std = self.gaussian(nothing, nothing, torch.arange(len(self)))
        return std > 0

    def index_of(self, timesteps: Tensor) -> Tensor:
        """Returns the step [B] of each timestep [B].

        Raises:
            ValueError: a timestep is not in the schedule.
        """
        matches = timesteps.detach().cpu()[:, None] == self.timesteps[None]
        if not bool(matches.any(1).all()):
            unknown = timesteps[~matches.any(1).to(timesteps.device)].tolist()
            raise ValueError(f"Timesteps {unknown} came. Use those of the schedule: {self.timesteps.tolist()}.")
        return matches.int().argmax(1)
