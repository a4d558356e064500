"""The documented statistics of an epoch, from what its samples and updates are."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trimtab_common.conditions import Vitals
from trimtab_common.stats import Deviation, Mean
from trimtab_diffusion.trajectories import tensors_of

from .algorithm import Updated
from .config import DDPOConfig
from .sampling import Samples

OF_LOSSES = ("loss", "approx_kl", "clipfrac")


def of_samples(samples: Samples, advantages: Tensor, config: DDPOConfig) -> dict[str, Any]:
    """Statistics of the rewards and advantages, the memory of the trajectories, and the clip range of their latents."""
    path = samples.trajectories
    dimensions = path.dimensions
    return {
        "reward_mean": Mean.of(samples.rewards),
        "reward_std": Deviation.of(samples.rewards),
        "rewards": samples.rewards,
        "advantages/zero": Mean.of((advantages == 0).float()),
        "memory/trajectories_mb": sum(tensor.nbytes for tensor in tensors_of(vars(path))) / 1e6,
        "clip_range": config.clip_range(dimensions),
        "clip_range_nats": config.clip_range(dimensions) * dimensions,
        **{f"other/{name}": Mean.of(values) for name, values in samples.others.items()},
    }


def of_updates(updated: Updated, *, dimensions: int, random_steps: int) -> dict[str, Mean]:
    """Statistics of an epoch's updates.

    Args:
        updated: holds the three documented losses of each part, or only the first.
        dimensions: numbers in the latents of a sample.
        random_steps: steps of a sample that have a log-probability.
    """
    counts = torch.tensor([float(count) for count, _, _ in updated.parts])
    columns = dict(zip(OF_LOSSES, zip(*(losses for _, losses, _ in updated.parts), strict=True), strict=False))
    moved = [each for _, _, each in updated.parts if each is not None]
    stats: dict[str, Mean] = {}
    if moved:
        columns["loss"] = tuple(each.surrogate for each in moved)
        log_ratio = torch.cat([each.log_ratio for each in moved])
        stats = {"ratio": Mean.of(log_ratio.exp()), "policy/nats": Mean.of(log_ratio.abs() * dimensions)}
    if penalties := [each.kl for each in moved if each.kl is not None]:
        stats["objective/kl"] = Mean.of(torch.cat(penalties) * dimensions * random_steps)
    for name, values in columns.items():
        stats[name] = Mean((torch.stack(values).cpu().double() * counts).sum(), counts.sum())
    return stats


def vitals(stats: Mapping[str, float], config: DDPOConfig) -> Vitals:
    """The quantities of an epoch that its health is judged by.

    The deviation of the rewards is the scale only of `estimator="rwr"`: other estimators divide by it.
    """
    return Vitals(
        kl=stats.get("objective/kl"),
        kl_coef=stats.get("objective/kl_coef"),
        clip_fraction=stats.get("clipfrac"),
        reward_std=stats["reward_std"],
        scale=config.rwr_beta * stats["reward_std"] if config.estimator == "rwr" else None,
    )
