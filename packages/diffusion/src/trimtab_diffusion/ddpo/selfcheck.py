"""Checks before the first update that the policy reproduces its sampling probabilities."""

import warnings

import torch
from accelerate import Accelerator
from torch import nn

from trimtab_common.conditions import OTHER_REFERENCE
from trimtab_common.health import rounding_of, warn_at_start
from trimtab_diffusion.steps import gaussian_kl, gaussian_logprob
from trimtab_diffusion.training.setup import Reference
from trimtab_diffusion.trajectories import Trajectories, sampled_pairs

from .config import DDPOConfig


class ReplayError(RuntimeError):
    """Replayed steps differ from the sampled ones: training would follow differences that are no learning."""


def check_first(
    path: Trajectories, denoiser: nn.Module, reference: Reference | None, config: DDPOConfig, accelerator: Accelerator
) -> dict[str, float]:
    """Checks a run's first samples before its first update: replays the steps of the first ones.

    Args:
        path: the samples' trajectories, under the same weights.
        denoiser: the policy.
        reference: what the KL penalty is against; None: there is none.
        config: the trainer's config.
        accelerator: the trainer's accelerator.

    Returns:
        `selfcheck/nats`, the largest log-ratio of a step, in nats of the joint probability; nothing for reward-weighted
        regression, which has no ratios.

    Raises:
        ReplayError: the mean difference is above a tenth of the clip range, where all is computed and kept in float32.
            Elsewhere kernels round, and this is a warning.
    """
    is_random = path.schedule.steps.is_random
    steps = is_random.nonzero().flatten()
    window = slice(*(path.schedule.steps.window or (None,)))
    if silent := int((~is_random[window]).sum()):
        warnings.warn(
            f"{silent} of {len(is_random)} steps have no noise in this schedule: they are left out of training. With "
            "timestep_spacing='leading', steps_offset=1 and set_alpha_to_one=False every step has noise.",
            stacklevel=3,
        )
    if config.is_regression:
        return {}
    if not len(steps):
        return {"selfcheck/nats": 0.0}
    is_tf32 = config.allow_tf32 and accelerator.device.type == "cuda"
    is_float32 = path.first.dtype in (torch.float32, torch.float64)
    is_exact = accelerator.mixed_precision == "no" and not is_tf32 and is_float32
    every = torch.cartesian_prod(torch.arange(min(config.sample_batch_size, len(path))), steps)
    gaps, first_kl = [], None
    for chunk in every.split(config.train_batch_size):
        rows, index = chunk.unbind(1)
        pairs = sampled_pairs(path, accelerator.device, rows, index)
        with torch.no_grad():
            mean, std = path.schedule.gaussian(denoiser, pairs.latents, index, pairs.conditions)
        gaps.append((gaussian_logprob(pairs.next_latents, mean, std) - pairs.logprobs).abs().cpu())
        if reference is not None and first_kl is None:
            with torch.no_grad(), reference() as frozen:
                ref_mean, _ = path.schedule.gaussian(frozen, pairs.latents, index, pairs.conditions)
            first_kl = float((gaussian_kl(mean, ref_mean, std) * path.dimensions).max())
    nats = float(torch.cat(gaps).max()) * path.dimensions
    _judge(float(torch.cat(gaps).mean()), nats, config.clip_range(path.dimensions), is_exact=is_exact)
    if first_kl is not None:
        warn_at_start(OTHER_REFERENCE, first_kl, rounding=rounding_of(torch.float32, is_mixed=not is_exact))
    return {"selfcheck/nats": nats}


def _judge(mean: float, nats: float, clip: float, *, is_exact: bool) -> None:
    if mean <= clip / 10:
        return
    problem = (
        f"Before the first update, replayed steps differ from the sampled ones by {mean:.3g} nats per dimension in "
        f"the mean (at most {nats:.3g} of the joint probability), more than a tenth of the clip range {clip:.3g}: "
        "ratios do not start from 1."
    )
    if is_exact:
        raise ReplayError(
            f"{problem} Is there dropout or noise in the denoiser, or a hook that changes its inputs between "
            "sampling and training? Were its weights changed in between?"
        )
    warnings.warn(
        f"{problem} Half precision rounds differently in batches of other sizes: set train_batch_size to "
        "sample_batch_size, a wider train_clip_range, or mixed_precision='no'.",
        stacklevel=4,
    )
