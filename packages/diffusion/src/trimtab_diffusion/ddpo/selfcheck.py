"""Before the first update the policy must give the probabilities that it sampled with."""

import warnings

import torch
from accelerate import Accelerator
from torch import nn

from trimtab_common.conditions import OTHER_REFERENCE
from trimtab_common.health import rounding_of, warn_at_start
from trimtab_diffusion.recording import Trajectories
from trimtab_diffusion.steps import gaussian_kl, gaussian_logprob

from .config import DDPOConfig
from .objective import Reference
from .replay import Replay


class ReplayError(RuntimeError):
    """Replayed steps differ from the sampled ones: training would follow differences that are no learning."""


def check_first(
    trajectories: Trajectories,
    denoiser: nn.Module,
    reference: Reference | None,
    config: DDPOConfig,
    accelerator: Accelerator,
) -> dict[str, float]:
    """Checks a run's first samples before its first update.

    Args:
        trajectories: of the samples.
        denoiser: the policy.
        reference: what the KL penalty is against; None: there is none.
        config: of the trainer.
        accelerator: of the trainer.

    Returns:
        `selfcheck/nats`, see `check_replay`; nothing for reward-weighted regression, which has no ratios.
    """
    steps = trajectories.steps
    silent = int((~steps.is_random).sum())
    if silent:
        warnings.warn(
            f"{silent} of {len(steps)} steps have no noise in this schedule, and so no log-probability: they are left "
            "out of training. With timestep_spacing='leading', steps_offset=1 and set_alpha_to_one=False every step "
            "has noise.",
            stacklevel=4,
        )
    if config.is_regression:
        return {}
    is_tf32 = config.allow_tf32 and accelerator.device.type == "cuda"
    is_float32 = trajectories.first.dtype in (torch.float32, torch.float64)
    exact = accelerator.mixed_precision == "no" and not is_tf32 and is_float32
    nats = check_replay(
        trajectories,
        denoiser,
        samples=config.sample_batch_size,
        batch_size=config.train_batch_size,
        clip=config.clip_range(trajectories.dimensions),
        exact=exact,
        device=accelerator.device,
    )
    if reference is not None:
        check_reference(
            trajectories,
            denoiser,
            reference,
            batch_size=config.train_batch_size,
            exact=exact,
            device=accelerator.device,
        )
    return {"selfcheck/nats": nats}


@torch.no_grad()
def check_reference(
    trajectories: Trajectories,
    denoiser: nn.Module,
    reference: Reference,
    *,
    batch_size: int,
    exact: bool,
    device: torch.device,
) -> None:
    """Policy and reference take the first sample's steps with the same probability.

    Args:
        trajectories: of the samples.
        denoiser: the policy.
        reference: what the KL penalty is against.
        batch_size: steps at a time.
        exact: see `check_replay`.
        device: where the denoiser is.
    """
    steps = trajectories.steps.is_random.nonzero().flatten()[:batch_size]
    if not len(steps):
        return
    replay = Replay.of(trajectories, torch.zeros_like(steps), steps, device)
    mean, std = replay.gaussian(denoiser)
    with reference() as frozen:
        ref_mean, _ = replay.gaussian(frozen)
    kl = float((gaussian_kl(mean, ref_mean, std) * replay.dimensions).max())
    warn_at_start(OTHER_REFERENCE, kl, rounding=rounding_of(torch.float32, is_mixed=not exact))


@torch.no_grad()
def check_replay(
    trajectories: Trajectories,
    denoiser: nn.Module,
    *,
    samples: int,
    batch_size: int,
    clip: float,
    exact: bool,
    device: torch.device,
) -> float:
    """Replays the steps of the first samples.

    Args:
        trajectories: as recorded, under the same weights.
        denoiser: the policy.
        samples: how many are replayed.
        batch_size: steps at a time, as in training.
        clip: the range that ratios per dimension are clipped to.
        exact: whether all is computed in float32, and the latents are kept so.
        device: where the denoiser is.

    Returns:
        The largest log-ratio of a step, in nats of the joint probability; 0 if no step has noise.

    Raises:
        ReplayError: the mean difference is above a tenth of `clip`, with `exact`; without it, where kernels round,
            this is a warning.
    """
    steps = trajectories.steps.is_random.nonzero().flatten()
    if len(steps) == 0:
        return 0.0
    pairs = torch.cartesian_prod(torch.arange(min(samples, len(trajectories))), steps)
    replays = (Replay.of(trajectories, chunk[:, 0], chunk[:, 1], device) for chunk in pairs.split(batch_size))
    gaps = torch.cat(
        [
            (gaussian_logprob(replay.next_latents, *replay.gaussian(denoiser)) - replay.logprobs).abs().cpu()
            for replay in replays
        ]
    )
    mean, nats = float(gaps.mean()), float(gaps.max()) * trajectories.dimensions
    if mean > clip / 10:
        problem = (
            f"Before the first update, replayed steps differ from the sampled ones by {mean:.3g} nats per dimension in "
            f"the mean (at most {nats:.3g} of the joint probability), more than a tenth of the clip range {clip:.3g}: "
            "ratios do not start from 1."
        )
        if exact:
            raise ReplayError(
                f"{problem} Is there dropout or noise in the denoiser, or a hook that changes its inputs between "
                "sampling and training? Were its weights changed in between?"
            )
        warnings.warn(
            f"{problem} Half precision rounds differently in batches of other sizes: set train_batch_size to "
            "sample_batch_size, a wider train_clip_range, or mixed_precision='no'.",
            stacklevel=4,
        )
    return nats
