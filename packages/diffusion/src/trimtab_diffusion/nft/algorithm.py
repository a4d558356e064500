"""DiffusionNFT (Zheng et al. 2025, arXiv:2509.16117, algorithm 1): optimality of samples, their losses, the updates."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from trimtab_common.formulas.advantages import batch_scaled
from trimtab_common.stats import Mean, Stats
from trimtab_diffusion.training.optimizing import Updates
from trimtab_diffusion.training.setup import Reference
from trimtab_diffusion.trajectories import Pairs, Schedule, Trajectories, noised_pairs

from .config import DiffusionNFTConfig
from .loss import mean_square, nft_loss, optimality, self_normalized


def optimality_of(rewards: Tensor, prompts: Tensor, config: DiffusionNFTConfig) -> Tensor:
    """Optimality [B] of all processes' samples: rewards relative to their prompt's mean and to all rewards' deviation.

    Args:
        rewards: [B], float64.
        prompts: [B], int64, equal for equal prompts.
        config: the advantage from which it is 1.
    """
    return optimality(batch_scaled(rewards, prompts), largest=config.train_adv_clip_max)


def losses(
    pairs: Pairs,
    levels: Tensor,
    optimal: Tensor,
    schedule: Schedule,
    model: nn.Module,
    old: Callable[[], AbstractContextManager[None]],
    reference: Reference | None,
    config: DiffusionNFTConfig,
) -> tuple[Tensor, Stats]:
    """Losses [n] of noised samples, and their statistics.

    As in the paper's code, Eq. 5 is multiplied by `train_adv_clip_max` / beta. At the old policy its gradient is then
    the advantage times that of supervised training, whatever beta is.

    Args:
        pairs: n samples, noised; `next_latents` is what the denoiser should predict.
        levels: [n], int64, on the CPU: their noise levels.
        optimal: [n].
        schedule: the noise levels, and how the denoiser is asked.
        model: the denoiser, as it was prepared.
        old: a context in which `model` has the weights that sampled.
        reference: gives the denoiser as it was before training.
        config: beta, the weights of levels, and the coefficient of the distance to the reference.
    """
    asked = (pairs.latents, levels, pairs.conditions)
    with torch.no_grad():
        with old():
            old_output = schedule.ask(model, *asked)
        if reference is not None:
            with reference() as frozen:
                ref_output = schedule.ask(frozen, *asked)
    output = schedule.ask(model, *asked)
    now, before, wanted, distance = output, old_output, pairs.next_latents, mean_square
    if config.adaptive_weights:
        now, before, wanted = (schedule.steps.denoised(each, pairs.latents, levels) for each in (now, before, wanted))
        distance = self_normalized
    policy = nft_loss(now, before, wanted, optimal, beta=config.beta, distance=distance)
    loss = config.train_adv_clip_max / config.beta * policy
    stats = {"policy/loss": policy, "policy/moved": mean_square(output, old_output)}
    if reference is not None:
        stats["objective/kl"] = kl = mean_square(output, ref_output)
        loss = loss + config.kl_coef * kl
    return loss, {name: Mean.of(value.detach()) for name, value in (stats | {"loss": loss}).items()}


def update(
    optimal: Tensor,
    path: Trajectories,
    losses_of: Callable[[Pairs, Tensor, Tensor], tuple[Tensor, Stats]],
    optimizer: Updates,
    *,
    generators: Sequence[torch.Generator],
    config: DiffusionNFTConfig,
) -> list[Stats]:
    """Passes over an epoch's samples: updates on shuffled (sample, noise level) pairs.

    Args:
        optimal: [B].
        path: the last latents of B samples; the noise levels are those of the steps.
        losses_of: losses and statistics of pairs, of their levels and of their optimality.
        optimizer: takes the updates.
        generators: one for each pass, on the CPU.
        config: sizes of updates and of their parts.

    Returns:
        The statistics of each part and of each update.
    """
    stats, count, device = list[Stats](), config.trained_levels, optimizer.accelerator.device
    for generator in generators:
        for samples in torch.randperm(len(optimal), generator=generator).split(config.samples_per_update):
            drawn = [torch.randperm(len(path.schedule.steps), generator=generator)[:count] for _ in samples]
            rows, levels = samples.repeat_interleave(count), torch.cat(drawn)
            for part in optimizer.parts(torch.randperm(len(rows), generator=generator).split(config.train_batch_size)):
                pairs = noised_pairs(path, device, rows[part], levels[part], generator)
                loss, of_part = losses_of(pairs, levels[part], optimal[rows[part]].to(device))
                optimizer.backward(loss.mean(), len(part) / len(rows))
                stats.append(of_part)
            stats.append(optimizer.step())
    return stats
