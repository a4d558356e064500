"""AlignProp (Prabhudesai et al. 2023, arXiv:2310.03739) and DRaFT (Clark et al. 2023, arXiv:2309.17400)."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from trimtab_common.stats import Deviation, Mean, Stats
from trimtab_diffusion.steps import Steps
from trimtab_diffusion.training.optimizing import Updates
from trimtab_diffusion.trajectories import Trajectories, sampled_pairs

from .config import AlignPropConfig

SMALL_STEP = 0.05
"""The t of a flow from which a last step changes the image too little to train through it alone."""


def warn_of_first_steps(config: AlignPropConfig) -> None:
    """Warns of a fixed first step with a gradient that is not read, and of bounds of a drawn one beyond the steps."""
    if not config.truncated_backprop_rand:
        return
    fixed = config.truncated_backprop_timestep
    if fixed != AlignPropConfig.truncated_backprop_timestep:
        warnings.warn(
            f"truncated_backprop_timestep={fixed} has no effect: truncated_backprop_rand=True draws the first step "
            "with a gradient. Set truncated_backprop_rand=False, or leave the step out.",
            stacklevel=3,
        )
    (low, high), count = config.truncated_rand_backprop_minmax, config.sample_num_steps
    if high > count:
        warnings.warn(
            f"truncated_rand_backprop_minmax=({low}, {high}) reaches beyond the {count} steps of a sample: "
            f"{(high - count + 2) / (high - low + 1):.0%} of the draws mean the last step, K = 1. Set it to "
            f"({low}, {count - 1}) to draw all of these steps equally often.",
            stacklevel=3,
        )


def warn_of_a_small_last_step(steps: Steps, first: int) -> None:
    """Warns where the gradient, from step `first` on, goes through nothing but a flow's last step from a small t."""
    if steps.is_flow and first == len(steps) - 1 and (t := float(steps.before[-1])) < SMALL_STEP:
        warnings.warn(
            f"The gradient goes through the last step alone, which this flow takes from t = {t:.2g}: it changes the "
            "image by about this share of the denoiser's output, and almost nothing trains. Let the gradient start "
            "earlier (truncated_backprop_timestep), or pass the pipeline larger last steps, "
            'call_kwargs={"sigmas": [...]}.',
            stacklevel=3,
        )


def first_step(config: AlignPropConfig, generator: torch.Generator) -> int:
    """The first denoising step with a gradient: K = T - this (AlignProp section 4, DRaFT-K of DRaFT section 4)."""
    if not config.truncated_backprop_rand:
        return config.truncated_backprop_timestep
    low, high = config.truncated_rand_backprop_minmax
    drawn = int(torch.randint(low, high + 1, (), generator=generator))
    return min(drawn, config.sample_num_steps - 1)


def latents_with_gradient(path: Trajectories, denoiser: nn.Module, first: int) -> Tensor:
    """The last latents of sampled images, as a function of the denoiser's weights: DRaFT algorithm 1.

    A step is x' = mean(x) + std noise. The noise stays as it was drawn, so that the gradient goes through the means,
    from one step to the next.

    Args:
        path: the steps of B images, sampled with the denoiser's weights.
        denoiser: as it was prepared.
        first: the steps from this one on have a gradient.

    Returns:
        [B, ...], equal to the sampled latents.
    """
    schedule, device = path.schedule, path.first.device
    latents = torch.empty(0)
    for step in range(first, len(schedule.steps)):
        index = torch.full((len(path),), step)
        pairs = sampled_pairs(path, device, torch.arange(len(path)), index)
        before = pairs.latents if step == first else latents
        mean, _ = schedule.gaussian(denoiser, before, index, pairs.conditions)
        latents = (pairs.next_latents + (mean - mean.detach())).to(pairs.latents.dtype)
    return latents


def redrawn_latents(path: Trajectories, denoiser: nn.Module, count: int, generator: torch.Generator) -> Tensor:
    """Sampled latents that are noised again and take their last step once more: DRaFT-LV (section 4, algorithm 1).

    The gradients of several noises, averaged, have less variance than that of the one that was drawn.

    Args:
        path: the steps of B images.
        denoiser: as it was prepared.
        count: how many times each is noised.
        generator: draws the noise, on the latents' device.

    Returns:
        [count B, ...], all B images with the first noise, and so on.
    """
    schedule, device = path.schedule, path.first.device
    rows = torch.arange(len(path)).repeat(count)
    index = torch.full_like(rows, len(schedule.steps) - 1)
    pairs = sampled_pairs(path, device, rows, index)
    noise = torch.randn(pairs.latents.shape, generator=generator, device=device)
    noised, _ = schedule.steps.noised(pairs.next_latents.float(), noise, index)
    mean, _ = schedule.gaussian(denoiser, noised.to(pairs.latents.dtype), index, pairs.conditions)
    return mean.to(pairs.latents.dtype)


def depends_on(result: Tensor, source: Tensor) -> bool:
    """Whether a backward pass from one tensor reaches another; weights of a reward model do not count."""
    if not (result.requires_grad and source.requires_grad):
        return False
    wanted, seen, left = get_gradient_edge(source).node, set[Node](), [get_gradient_edge(result).node]
    while left:
        node = left.pop()
        if node is wanted:
            return True
        seen.add(node)
        left += [before for before, _ in node.next_functions if before is not None and before not in seen]
    return False


def reward_loss(rewards: Tensor) -> Tensor:
    """10 - r, averaged (AlignProp, whose aesthetic scores are below 10); the constant has no gradient.

    Args:
        rewards: [B].
    """
    return 10.0 - rewards.mean()


def update(
    count: int,
    rewards_of: Callable[[Tensor], Tensor],
    loss_of: Callable[[Tensor], Tensor],
    optimizer: Updates,
    *,
    config: AlignPropConfig,
) -> list[Stats]:
    """One optimizer step on `count` samples; returns its statistics.

    Args:
        count: samples of the step.
        rewards_of: samples the images with the numbers [n], and returns their rewards, with a gradient.
        loss_of: the loss of rewards, a mean.
        optimizer: takes the step.
        config: how many samples have room at a time.
    """
    stats = list[Stats]()
    for part in optimizer.parts(torch.arange(count).split(config.train_batch_size)):
        rewards = rewards_of(part)
        loss = loss_of(rewards)
        optimizer.backward(loss, len(part) / count)
        seen = rewards.detach()
        moments: Stats = {"reward_mean": Mean.of(seen), "reward_std": Deviation.of(seen)}
        stats.append(moments | {"loss": Mean(loss.detach() * len(part), len(part))})
    return [*stats, optimizer.step()]
