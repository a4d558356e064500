"""Diffusion-DPO (Wallace et al. 2023, arXiv:2311.12908): noised pairs of pictures, their errors, and the updates."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trimtab_common.stats import Mean, Stats
from trimtab_diffusion.ddpo.loss import denoising_loss
from trimtab_diffusion.training.optimizing import Updates
from trimtab_diffusion.training.setup import Reference
from trimtab_diffusion.trajectories import Arguments, Trajectories, sampled_pairs

from .config import DiffusionDPOConfig
from .loss import diffusion_dpo_loss


class Noised(NamedTuple):
    """n pairs of pictures with their noise: the chosen ones, then the rejected ones, 2n rows.

    Args:
        latents: [2n, ...], noised.
        targets: [2n, ...], what the denoiser should predict.
        levels: [2n], int64, on the CPU: the noise level of each row, equal within a pair.
        conditions: the denoiser's other arguments.
    """

    latents: Tensor
    targets: Tensor
    levels: Tensor
    conditions: Arguments


def noised(pictures: Trajectories, device: torch.device, rows: Tensor, generator: torch.Generator) -> Noised:
    """Noises both pictures of pairs alike, at random levels.

    Args:
        pictures: the clean latents of all N pairs, in two steps: the chosen ones, then the rejected ones.
        device: where the result is.
        rows: [n], int64, numbers of pairs, on the CPU.
        generator: draws levels and noise, on the CPU.
    """
    schedule = pictures.schedule
    levels = torch.randint(len(schedule.steps), rows.shape, generator=generator).repeat(2)
    clean = sampled_pairs(pictures, device, rows.repeat(2), torch.arange(2).repeat_interleave(len(rows)))
    noise = torch.randn((len(rows), *clean.next_latents.shape[1:]), generator=generator).to(device)
    noise = torch.cat([noise, noise])
    latents, targets = schedule.steps.noised(clean.next_latents.float(), noise, levels)
    return Noised(latents, targets, levels, clean.conditions)


def errors(pictures: Trajectories, denoiser: nn.Module, batch: Noised) -> tuple[Tensor, Tensor]:
    """Squared errors per dimension on chosen pictures [n] and on rejected ones [n]."""
    prediction = pictures.schedule.ask(denoiser, batch.latents, batch.levels, batch.conditions)
    first, second = denoising_loss(prediction, batch.targets, torch.ones((), device=prediction.device)).chunk(2)
    return first, second


RefErrors = Callable[[Noised], tuple[Tensor, Tensor]]
"""The reference's `errors` on noised pairs."""


@torch.no_grad()
def reference_errors(pictures: Trajectories, reference: Reference, batch: Noised) -> tuple[Tensor, Tensor]:
    """`errors` of the denoiser as it was before training."""
    with reference() as frozen:
        return errors(pictures, frozen, batch)


@torch.no_grad()
def precomputed(
    pictures: Trajectories,
    reference: Reference,
    batches: Sequence[Tensor],
    device: torch.device,
    *,
    generator: torch.Generator,
    config: DiffusionDPOConfig,
) -> RefErrors:
    """`reference_errors` of all pairs that `update` will noise with such a generator; gives them in its order."""
    with reference() as frozen:
        parts = [part for rows in batches for part in rows.split(config.train_batch_size)]
        known = iter([errors(pictures, frozen, noised(pictures, device, part, generator)) for part in parts])
    return lambda _: next(known)


def update(
    pictures: Trajectories,
    model: nn.Module,
    ref_errors: RefErrors,
    batches: Sequence[Tensor],
    optimizer: Updates,
    *,
    generator: torch.Generator,
    config: DiffusionDPOConfig,
) -> list[Stats]:
    """Takes an optimizer step on each batch of pairs; returns the statistics of each part and of each step.

    Args:
        pictures: as of `noised`.
        model: the denoiser, as it was prepared.
        ref_errors: the errors of the denoiser as it was before training.
        batches: numbers of pairs, int64.
        optimizer: takes the steps.
        generator: draws levels and noise.
        config: sizes and beta.
    """
    stats = list[Stats]()
    for rows in batches:
        for part in optimizer.parts(rows.split(config.train_batch_size)):
            batch = noised(pictures, optimizer.accelerator.device, part, generator)
            frozen, own = ref_errors(batch), errors(pictures, model, batch)
            losses, chosen, rejected = diffusion_dpo_loss(*own, *frozen, beta=config.beta)
            optimizer.backward(losses.mean(), len(part) / len(rows))
            numbers = {
                "loss": losses,
                "rewards/chosen": chosen,
                "rewards/rejected": rejected,
                "rewards/margins": chosen - rejected,
                "rewards/accuracies": (chosen > rejected).float(),
                "errors/chosen": own[0],
                "errors/rejected": own[1],
            }
            stats.append({name: Mean.of(value.detach()) for name, value in numbers.items()})
        stats.append(optimizer.step())
    return stats
