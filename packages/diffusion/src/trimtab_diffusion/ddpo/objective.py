"""What an update minimises: the formulas of `loss`, on steps that are replayed."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from trimtab_common.stats import Mean
from trimtab_common.surrogate import clipped_surrogate, surrogate_stats
from trimtab_diffusion.recording import Trajectories
from trimtab_diffusion.steps import gaussian_kl, gaussian_logprob

from .loss import denoising_loss, score_function_loss
from .replay import Replay

Stats = dict[str, Mean]
Reference = Callable[[], AbstractContextManager[nn.Module]]
"""A context that gives the denoiser as it was before training."""


def policy_loss(
    denoiser: nn.Module,
    replay: Replay,
    advantages: Tensor,
    *,
    estimator: str,
    clip: float,
    reference: Reference | None,
    kl_coef: float,
) -> tuple[Tensor, Stats]:
    """DDPO-SF or DDPO-IS (Black et al. 2023, arXiv:2305.13301, Eqs. 6 and 7), with a KL penalty.

    Args:
        denoiser: the policy.
        replay: n steps.
        advantages: [n].
        estimator: "sf", the score function, or "is", importance sampling.
        clip: ratios per dimension are clipped to 1 +- this.
        reference: what the penalty is against; None for no penalty.
        kl_coef: the penalty's coefficient.

    Returns:
        The loss, a mean over the n steps, and its statistics.
    """
    mean, std = replay.gaussian(denoiser)
    logprobs = gaussian_logprob(replay.next_latents, mean, std)
    log_ratio = logprobs - replay.logprobs
    if estimator == "sf":
        loss = score_function_loss(logprobs, advantages).mean()
    else:
        loss = clipped_surrogate(log_ratio, advantages, clip_low=clip, clip_high=clip).mean()
    moves = surrogate_stats(log_ratio, advantages, torch.ones_like(log_ratio), clip_low=clip, clip_high=clip)
    stats = {"loss": Mean.of(loss), "approx_kl": moves["approxkl"], "clipfrac": moves["clipfrac"]}
    stats |= {"ratio": moves["ratio"], "policy/nats": Mean.of(log_ratio.abs() * replay.dimensions)}
    if reference is not None:
        with torch.no_grad(), reference() as frozen:
            ref_mean, _ = replay.gaussian(frozen)
        kl = gaussian_kl(mean, ref_mean, std)
        loss = loss + kl_coef * kl.mean()
        stats["objective/kl"] = Mean.of(kl * replay.dimensions * int(replay.steps.is_random.sum()))
    return loss, stats


def regression_loss(
    denoiser: nn.Module,
    trajectories: Trajectories,
    rows: Tensor,
    steps: Tensor,
    weights: Tensor,
    generator: torch.Generator,
) -> tuple[Tensor, Stats]:
    """Reward-weighted regression on the sampled images (Black et al. 2023, section 4.1).

    Args:
        denoiser: the policy.
        trajectories: of the samples.
        rows: [n], int64: samples, whose last latents are the regression's images.
        steps: [n], int64: steps of the schedule, whose noise levels the images are given.
        weights: [n], on the denoiser's device.
        generator: of the noise, on the CPU.

    Returns:
        The loss, a mean over the n pairs, and its statistics.

    Raises:
        ValueError: the denoiser's conditions depend on the latents of each step.
    """
    if trajectories.conditions.stepwise:
        raise ValueError(
            "This pipeline's conditions depend on the latents of each step, which reward-weighted regression samples "
            "anew. Use estimator='is'."
        )
    replay = Replay.of(trajectories, rows, steps, weights.device)
    images = trajectories.after(rows, torch.full_like(rows, len(trajectories.steps) - 1), weights.device)
    noise = torch.randn(images.shape, generator=generator).to(images.device)
    noised, target = replay.steps.noised(images.float(), noise, steps)
    loss = denoising_loss(replay.predict(denoiser, noised.to(images.dtype)), target, weights).mean()
    return loss, {"loss": Mean.of(loss)}
