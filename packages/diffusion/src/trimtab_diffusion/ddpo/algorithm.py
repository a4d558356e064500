"""DDPO (Black et al. 2023, arXiv:2305.13301): advantages of rewards, and the updates."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from trimtab_common.formulas.advantages import batch_scaled, group_whitened
from trimtab_common.stats import Mean, Stats
from trimtab_diffusion.steps import ScheduleError, Steps
from trimtab_diffusion.training.optimizing import Updates
from trimtab_diffusion.trajectories import Pairs

from .config import DDPOConfig
from .loss import rwr_weights, sparse_weights

NO_NOISE = "No step of this schedule has noise: there is nothing to train. Use another scheduler."
Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Mapping[str, object]], Sequence[Tensor]]


class Losses(tuple[Tensor, ...]):
    """The three that `DDPOTrainer.calculate_loss` is documented to return, and the statistics of its n steps."""

    stats: Stats

    def __new__(cls, loss: Tensor, approx_kl: Tensor, clipped: Tensor, stats: Stats) -> Losses:
        losses = super().__new__(cls, (loss, approx_kl, clipped))
        losses.stats = stats
        return losses


def advantages_of(rewards: Tensor, prompts: Tensor, config: DDPOConfig) -> Tensor:
    """Advantages of all processes' samples over their group (GRPO) or the epoch; for RWR their weights.

    Args:
        rewards: [B], float64.
        prompts: [B], int64, equal for equal prompts.
        config: its estimator, group size, and scale of rewards.
    """
    if config.estimator == "rwr":
        return rwr_weights(rewards, prompts, beta=config.rwr_beta)
    if config.estimator == "rwr_sparse":
        return sparse_weights(rewards, top=config.rwr_top)
    size = config.group_size if config.group_size > 1 else len(rewards)
    scaled = group_whitened if config.scale_rewards == "group" else batch_scaled
    return scaled(rewards, torch.arange(len(rewards)) // size, correction=0)


def warn_of_single_samples(prompts: Tensor) -> None:
    """Warns where most prompts [B], equal numbers for equal ones, occur once: `rwr_weights` are 1 there."""
    _, counts = prompts.unique(return_counts=True)
    if (single := int((counts == 1).sum())) > len(counts) / 2:
        warnings.warn(
            f"{single} of {len(counts)} prompts occur once in the first epoch, and estimator='rwr' weighs samples of "
            "one prompt against each other: these train with the weight 1, whatever their reward. Set group_size to "
            "the samples per prompt, 2 or more, or use fewer prompts.",
            stacklevel=4,
        )


def window_of(config: DDPOConfig, epoch: int) -> tuple[int, int] | None:
    """The steps of an epoch that are random and train: MixGRPO (Li et al. 2025, arXiv:2507.21802). None: all.

    The window begins at the noise, moves towards the image, and begins again; or it stays at the noise.
    """
    size = config.sample_window
    if not size:
        return None
    interval = config.sample_window_interval
    first = epoch // interval % (config.sample_num_steps - size + 1) if interval else 0
    return first, first + size


def check_noise(config: DDPOConfig, steps: Steps) -> None:
    """ScheduleError if no step has noise, or if the window moves, by the last epoch, to where none has."""
    noisy, size = steps.is_random, config.sample_window
    if not noisy.any():
        raise ScheduleError(NO_NOISE)
    last = (config.num_epochs - 1) // (config.sample_window_interval or config.num_epochs)

    def silent(size: int) -> list[int]:
        places = range(min(last, len(noisy) - size) + 1)
        return [first for first in places if not noisy[first : first + size].any()]

    if size and config.sample_window_interval and (found := silent(size)):
        enough = next(larger for larger in range(size + 1, len(noisy) + 1) if not silent(larger))
        raise ScheduleError(
            f"sample_window={size} would move to step {found[0] + 1} of {len(noisy)}, from which on {size} of the "
            f"schedule's steps have no noise: nothing would train there. Set sample_window={enough} or more, "
            "sample_window_interval=0, or a scheduler whose every step has noise (DDIM: set_alpha_to_one=False and "
            "steps_offset=1)."
        )


def update(
    advantages: Tensor,
    random_steps: Tensor,
    pairs_of: Callable[[Tensor, Tensor, torch.Generator], Pairs],
    loss_of: Loss,
    optimizer: Updates,
    *,
    generators: Sequence[torch.Generator],
    config: DDPOConfig,
) -> list[Stats]:
    """Passes over an epoch's samples: updates on shuffled (sample, step) pairs.

    Args:
        advantages: [B].
        random_steps: steps that have a log-probability, int64, of which a random share trains.
        pairs_of: the pairs of samples [n] and steps [n].
        loss_of: their loss, a mean; see `DDPOTrainer.calculate_loss`.
        optimizer: takes the updates.
        generators: one for each pass.
        config: sizes of updates and of their parts.

    Returns:
        The statistics of each part and of each update.

    Raises:
        ScheduleError: no step has noise.
    """
    count, stats = min(config.trained_steps, len(random_steps)), list[Stats]()
    if count == 0:
        raise ScheduleError(NO_NOISE)
    for generator in generators:
        for samples in torch.randperm(len(advantages), generator=generator).split(config.samples_per_update):
            drawn = [random_steps[torch.randperm(len(random_steps), generator=generator)[:count]] for _ in samples]
            rows, steps = samples.repeat_interleave(count), torch.cat(drawn)
            for part in optimizer.parts(torch.randperm(len(rows), generator=generator).split(config.train_batch_size)):
                pairs = pairs_of(rows[part], steps[part], generator)
                gains = advantages[rows[part]].to(pairs.latents.device)
                losses = loss_of(
                    pairs.latents, pairs.timesteps, pairs.next_latents, pairs.logprobs, gains, pairs.conditions
                )
                optimizer.backward(losses[0], len(part) / len(rows))
                stats.append(losses.stats if isinstance(losses, Losses) else stats_of(losses, len(part)))
            stats.append(optimizer.step())
    return stats


def stats_of(losses: Sequence[Tensor], count: int) -> Stats:
    """The statistics of a part of `count` pairs whose loss is a replaced `calculate_loss`, or regression."""
    means = zip(("loss", "approx_kl", "clipfrac"), losses, strict=False)
    return {name: Mean(torch.as_tensor(value).detach() * count, count) for name, value in means}
