"""What an update minimises, as the config chooses it: the formulas of `loss`, on steps that are replayed."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from trimtab_common.formulas.advantages import group_whitened
from trimtab_common.formulas.surrogate import clipped_surrogate, surrogate_stats
from trimtab_common.stats import Mean
from trimtab_diffusion.prompt_stats import PerPromptStatTracker
from trimtab_diffusion.recording import Trajectories
from trimtab_diffusion.steps import gaussian_kl, gaussian_logprob

from .config import DDPOConfig
from .loss import denoising_loss, rwr_weights, score_function_loss, sparse_weights
from .replay import Replay

Stats = dict[str, Mean]
Loss = Callable[[Tensor, float, Tensor], Tensor]
"""A mean over steps, of their advantages [n], the clip range and the probability ratios [n]."""
Reference = Callable[[], AbstractContextManager[nn.Module]]
"""A context that gives the denoiser as it was before training."""


def advantages_of(
    prompts: Sequence[str], rewards: Tensor, *, config: DDPOConfig, prompt_stats: PerPromptStatTracker | None
) -> Tensor:
    """How much better than expected the samples of all processes are; for RWR their weights.

    The expectation is that of the prompt's earlier rewards (Black et al. 2023, section 4.2), of the group of one draw
    of the prompt (GRPO), or of the epoch. Deviations are the population's.

    Args:
        prompts: B texts.
        rewards: [B], float64.
        config: its estimator, group size and clip range of advantages.
        prompt_stats: earlier rewards of each prompt, which get these; None: not used.

    Returns:
        [B].
    """
    if config.estimator == "rwr":
        numbers = {prompt: number for number, prompt in enumerate(prompts)}
        return rwr_weights(rewards, torch.tensor([numbers[prompt] for prompt in prompts]), beta=config.rwr_beta)
    if config.estimator == "rwr_sparse":
        return sparse_weights(rewards, top=config.rwr_top)
    if prompt_stats is not None:
        advantages = prompt_stats.update(prompts, rewards)
    else:
        size = config.group_size if config.group_size > 1 else len(rewards)
        advantages = group_whitened(rewards, torch.arange(len(rewards)) // size, correction=0)
    return advantages.clamp(-config.train_adv_clip_max, config.train_adv_clip_max)


def policy_loss(
    denoiser: nn.Module,
    replay: Replay,
    advantages: Tensor,
    *,
    config: DDPOConfig,
    reference: Reference | None,
    kl_coef: float,
    loss: Loss | None = None,
) -> tuple[Tensor, Stats]:
    """DDPO-SF or DDPO-IS (Black et al. 2023, arXiv:2305.13301, Eqs. 6 and 7), with a KL penalty.

    Args:
        denoiser: the policy.
        replay: n steps.
        advantages: [n].
        config: its estimator, "sf" or "is", and its clip range.
        reference: what the penalty is against; None for no penalty.
        kl_coef: the penalty's coefficient.
        loss: takes the place of Eqs. 6 and 7; see `DDPOTrainer.loss`.

    Returns:
        The loss, a mean over the n steps, and its statistics.
    """
    mean, std = replay.gaussian(denoiser)
    logprobs = gaussian_logprob(replay.next_latents, mean, std)
    total, stats = surrogate(logprobs, replay.logprobs, advantages, config=config, dimensions=replay.dimensions)
    if loss is not None:
        total = loss(advantages, config.clip_range(replay.dimensions), (logprobs - replay.logprobs).exp())
        stats["loss"] = Mean.of(total.detach().expand(len(logprobs)))
    if reference is not None:
        with torch.no_grad(), reference() as frozen:
            ref_mean, _ = replay.gaussian(frozen)
        kl = gaussian_kl(mean, ref_mean, std)
        total = total + kl_coef * kl.mean()
        stats["objective/kl"] = Mean.of(kl * replay.dimensions * int(replay.steps.is_random.sum()))
    return total, stats


def surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, config: DDPOConfig, dimensions: int
) -> tuple[Tensor, Stats]:
    """The loss of `policy_loss` without its penalty.

    Args:
        logprobs, old_logprobs: [...], of the steps, now and when they were sampled, nats per dimension.
        advantages: [...].
        config: its estimator, "sf" or "is", and its clip range.
        dimensions: numbers in the latents of a sample.

    Returns:
        The loss, a mean over the steps, and its statistics.
    """
    log_ratio, clip = logprobs - old_logprobs, config.clip_range(dimensions)
    if config.estimator == "sf":
        losses = score_function_loss(logprobs, advantages)
    else:
        losses = clipped_surrogate(log_ratio, advantages, clip_low=clip, clip_high=clip)
    moves = surrogate_stats(log_ratio, advantages, torch.ones_like(log_ratio), clip_low=clip, clip_high=clip)
    stats = {"loss": Mean.of(losses), "approx_kl": moves["approxkl"], "clipfrac": moves["clipfrac"]}
    return losses.mean(), stats | {"ratio": moves["ratio"], "policy/nats": Mean.of(log_ratio.abs() * dimensions)}


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
