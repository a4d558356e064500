"""Before the first update the policy must give the probabilities that it drew with."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from trimtab_diffusion.recording import Trajectories

Score = Callable[[Tensor, Tensor], Tensor]


class ReplayError(RuntimeError):
    """What is replayed is not what was drawn: training would clip, or follow, differences that are no learning."""


@torch.no_grad()
def check_replay(
    made: Trajectories, score: Score, *, pictures: int, batch_size: int, clip: float, exact: bool
) -> float:
    """Replay the steps of the first `pictures`, `batch_size` at a time; the largest log-ratio in nats of the joint.

    score: log-probabilities [n] of pairs of rows and steps, both [n]. clip: the range that ratios per dimension are
    clipped to. exact: whether all is computed in float32: then ReplayError for a mean difference of more than a tenth
    of `clip`; otherwise, where kernels round, a warning.
    """
    steps = made.steps.is_random.nonzero().flatten()
    if len(steps) == 0:
        return 0.0
    pairs = torch.cartesian_prod(torch.arange(min(pictures, len(made))), steps)
    gaps = torch.cat(
        [
            (score(*chunk.unbind(1)).cpu() - made.logprobs[chunk[:, 0], chunk[:, 1]].cpu()).abs()
            for chunk in pairs.split(batch_size)
        ]
    )
    mean, nats = float(gaps.mean()), float(gaps.max()) * made.dimensions
    if mean > clip / 10:
        problem = (
            f"Before the first update, replayed steps differ from the drawn ones by {mean:.3g} nats per dimension in "
            f"the mean (at most {nats:.3g} of the joint probability), more than a tenth of the clip range {clip:.3g}: "
            "ratios do not start from 1."
        )
        if exact:
            raise ReplayError(
                f"{problem} Is there dropout or noise in the denoiser, or a hook that changes its inputs between "
                "drawing and training? Were its weights changed in between?"
            )
        warnings.warn(
            f"{problem} Half precision rounds differently in batches of other sizes: set train_batch_size to "
            "sample_batch_size, a wider train_clip_range, or mixed_precision='no'.",
            stacklevel=4,
        )
    return nats
