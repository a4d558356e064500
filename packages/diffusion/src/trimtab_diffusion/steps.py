"""One denoising step as a Gaussian: mean, deviation, log-probability. All arithmetic in float32 at least."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor


def gaussian_logprob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """log N(x; mean, std^2 I) per dimension, in nats: the mean over all dimensions but the first.

    x, mean: [B, ...]; std: [B], positive. Returns [B]. The mean, not the sum, is what DDPO's ratio is made of (Black et
    al. 2023, arXiv:2305.13301, whose clip range of 1e-4 is on this scale); times the dimensions it is the joint one.
    """
    x, mean = _at_least_float32(x), _at_least_float32(mean)
    sigma = along(std.to(mean.dtype), mean)
    logprob = -0.5 * ((x - mean) / sigma) ** 2 - sigma.log() - 0.5 * math.log(2 * math.pi)
    return logprob.flatten(1).mean(1)


def gaussian_kl(mean: Tensor, ref_mean: Tensor, std: Tensor) -> Tensor:
    """KL(N(mean, std^2 I), N(ref_mean, std^2 I)) = |mean - ref_mean|^2 / (2 std^2) per dimension, in nats.

    mean, ref_mean: [B, ...]; std: [B], positive, that of the whole step. Returns [B], a mean over dimensions as in
    `gaussian_logprob`.
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
    eta: float,
    prediction_type: str,
    clip: float | None = None,
    threshold: tuple[float, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean [B, ...] and deviation [B] of a DDIM step (Song et al. 2021, arXiv:2010.02502, Eqs. 12 and 16).

    model_output, sample: [B, ...], of any floating dtype. alpha, alpha_next: [B], the products of alphas (the paper's
    alpha_t, others' bar alpha_t) before and after the step. eta: 0 is deterministic, 1 has the deviation of DDPM.
    prediction_type: what the model predicts: epsilon, sample or v_prediction. clip: x_0 is clamped to +- this.
    threshold: instead, quantile and largest value of dynamic thresholding (Saharia et al. 2022, arXiv:2205.11487).
    """
    output, x = _at_least_float32(model_output), _at_least_float32(sample)
    a, a_next = along(alpha.to(x.dtype), x), along(alpha_next.to(x.dtype), x)
    if prediction_type == "epsilon":
        x0, epsilon = (x - (1 - a).sqrt() * output) / a.sqrt(), output
    elif prediction_type == "sample":
        x0, epsilon = output, (x - a.sqrt() * output) / (1 - a).sqrt()
    elif prediction_type == "v_prediction":
        x0, epsilon = a.sqrt() * x - (1 - a).sqrt() * output, a.sqrt() * output + (1 - a).sqrt() * x
    else:
        raise ValueError(f"prediction_type={prediction_type!r} is none of epsilon, sample, v_prediction.")
    if threshold is not None:
        x0 = dynamic_threshold(x0, quantile=threshold[0], largest=threshold[1])
    elif clip is not None:
        x0 = x0.clamp(-clip, clip)
    std = eta * ((1 - a_next) / (1 - a) * (1 - a / a_next)).sqrt()
    mean = a_next.sqrt() * x0 + (1 - a_next - std**2).clamp(min=0).sqrt() * epsilon
    return mean, std.flatten()


def dynamic_threshold(x0: Tensor, *, quantile: float, largest: float) -> Tensor:
    """Clamp x_0 to its own quantile s of absolute values, 1 <= s <= largest, and divide by s; x0 and result [B, ...].

    Saharia et al. 2022, arXiv:2205.11487, section 2.3.
    """
    s = along(x0.flatten(1).abs().quantile(quantile, dim=1).clamp(1, max(1.0, largest)), x0)
    return torch.minimum(torch.maximum(x0, -s), s) / s


def flow_gaussian(
    velocity: Tensor, sample: Tensor, *, sigma: Tensor, sigma_next: Tensor, sigma_second: float, eta: float
) -> tuple[Tensor, Tensor]:
    """Mean [B, ...] and deviation [B] of a step of the SDE that has a flow's marginals (Flow-GRPO, arXiv:2505.05470).

    dx = (v + s^2 / (2 t) (x + (1 - t) v)) dt + s dw with s = eta sqrt(t / (1 - t)) (its Eqs. 8 and 9), taken from
    t = sigma to sigma_next, both [B], in one Euler-Maruyama step. velocity, sample: [B, ...]. At t = 1, where s is
    infinite, the second sigma of the schedule stands for t in s.
    """
    v, x = _at_least_float32(velocity), _at_least_float32(sample)
    t, dt = along(sigma.to(x.dtype), x), along((sigma_next - sigma).to(x.dtype), x)
    s = eta * (t / (1 - torch.where(t >= 1, sigma_second, t))).sqrt()
    drift = v + s**2 / (2 * t) * (x + (1 - t) * v)
    return x + drift * dt, (s * (-dt).sqrt()).flatten()


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def gaussian_sample(mean: Tensor, std: Tensor, generator: torch.Generator | None) -> Tensor:
    """A draw from N(mean, std^2 I). mean: [B, ...]; std: [B]. Returns [B, ...]."""
    noise = randn_tensor(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
    return mean + along(std, mean) * noise


def along(values: Tensor, like: Tensor) -> Tensor:
    """[B] as [B, 1, ...], with the dimensions of `like` and on its device."""
    return values.to(like.device).view(-1, *[1] * (like.dim() - 1))


@dataclass(frozen=True)
class Steps:
    """The T steps of a schedule, as tables [T] by which the steps of a batch, of whatever index each, are computed.

    timesteps: as the scheduler hands them out. before, after: the products of alphas (DDIM) or the sigmas (flow)
    around each step.
    """

    timesteps: Tensor
    before: Tensor
    after: Tensor
    eta: float
    is_flow: bool
    prediction_type: str = "epsilon"
    clip: float | None = None
    threshold: tuple[float, float] | None = None

    @classmethod
    def of(cls, scheduler: Any, eta: float) -> Steps:
        """The steps that a DDIM or a flow-matching Euler scheduler will take, after its `set_timesteps`."""
        config, timesteps = scheduler.config, scheduler.timesteps.detach().cpu()
        if eta < 0 or (eta > 1 and not is_flow(scheduler)):
            raise ValueError(f"eta={eta}: DDIM takes 0 to 1, a flow any number from 0.")
        if is_flow(scheduler):
            sigmas = scheduler.sigmas.detach().cpu().float()
            if len(timesteps) < 2:
                raise ValueError("A flow needs two steps or more: the noise of its first is made of its second sigma.")
            return cls(timesteps, sigmas[:-1], sigmas[1:], eta, is_flow=True)
        if type(scheduler).__name__ != "DDIMScheduler":
            raise ValueError(
                f"{type(scheduler).__name__} has no log-probabilities. Use a DDIMScheduler or a "
                "FlowMatchEulerDiscreteScheduler; `pipelines.trainable_scheduler` makes one of another's settings."
            )
        # diffusers' own arithmetic, also where its spacing makes it differ from the next timestep of the list.
        following = timesteps - config.num_train_timesteps // scheduler.num_inference_steps
        alphas = scheduler.alphas_cumprod.cpu()
        after = torch.where(following >= 0, alphas[following.clamp(min=0)], scheduler.final_alpha_cumprod.cpu())
        threshold = (config.dynamic_thresholding_ratio, config.sample_max_value) if config.thresholding else None
        clip = config.clip_sample_range if config.clip_sample and not threshold else None
        before = alphas[timesteps]
        if config.prediction_type == "epsilon" and bool((before == 0).any()):
            raise ValueError(
                "A schedule that begins with pure noise (rescale_betas_zero_snr) leaves nothing to divide by when the "
                "model predicts epsilon. Use a v_prediction model, or rescale_betas_zero_snr=False."
            )
        return cls(
            timesteps, before, after, eta, is_flow=False, prediction_type=config.prediction_type, clip=clip,
            threshold=threshold,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.timesteps)

    def gaussian(self, model_output: Tensor, sample: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [B, ...] and deviation [B] of x after the step `index` [B, int64] of each row, from x before it."""
        index = index.cpu()
        if self.is_flow:
            return flow_gaussian(
                model_output, sample, sigma=self.before[index], sigma_next=self.after[index],
                sigma_second=float(self.before[min(1, len(self) - 1)]), eta=self.eta,
            )  # fmt: skip
        return ddim_gaussian(
            model_output, sample, alpha=self.before[index], alpha_next=self.after[index], eta=self.eta,
            prediction_type=self.prediction_type, clip=self.clip, threshold=self.threshold,
        )  # fmt: skip

    def logprob(self, model_output: Tensor, sample: Tensor, following: Tensor, index: Tensor) -> Tensor:
        """log-probability [B] per dimension of having stepped from `sample` to `following`, both [B, ...]."""
        mean, std = self.gaussian(model_output, sample, index)
        return gaussian_logprob(following, mean, std)

    def noised(self, x0: Tensor, noise: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """x0 [B, ...] with the noise that steps `index` [B] begin from, and what the denoiser should say of it.

        DDIM: Ho et al. 2020, arXiv:2006.11239, Eq. 4; v of Salimans & Ho 2022, arXiv:2202.00512. Flow: x0 + t v with
        the velocity v = noise - x0. noise: as x0. Returns both [B, ...], of x0's dtype.
        """
        level = along(self.before[index.cpu()].to(x0.dtype), x0)
        if self.is_flow:
            return x0 + level * (noise - x0), noise - x0
        signal, deviation = level.sqrt(), (1 - level).sqrt()
        targets = {"epsilon": noise, "sample": x0, "v_prediction": signal * noise - deviation * x0}
        return signal * x0 + deviation * noise, targets[self.prediction_type]

    @property
    def is_random(self) -> Tensor:
        """[T], bool: which steps have a deviation, and so a log-probability."""
        nothing = torch.zeros(len(self), 1, dtype=torch.float64)
        _, std = self.gaussian(nothing, nothing, torch.arange(len(self)))
        return std > 0

    def index_of(self, timesteps: Tensor) -> Tensor:
        """The step [B] of each timestep [B]; ValueError for one that the schedule does not have."""
        matches = timesteps.detach().cpu()[:, None] == self.timesteps[None]
        if not bool(matches.any(1).all()):
            unknown = timesteps[~matches.any(1).to(timesteps.device)].tolist()
            raise ValueError(f"timesteps {unknown} are not steps of the schedule {self.timesteps.tolist()}.")
        return matches.int().argmax(1)


def is_flow(scheduler: Any) -> bool:
    """Whether a scheduler moves along a flow (sigmas from 1 to 0) and not along products of alphas."""
    return "FlowMatch" in type(scheduler).__name__
