"""The objective of Diffusion-DPO."""

from torch import Tensor
from torch.nn.functional import logsigmoid


def diffusion_dpo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, *, beta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """-log sigmoid(r(chosen) - r(rejected)), r = -beta / 2 (error - reference's error): Wallace et al. 2023, Eq. 14.

    Diffusion-DPO's paper is arXiv:2311.12908. Its weights omega(lambda_t) are constant, and they and the T of its
    beta T omega are part of beta, as in its released code; that code's factor 1/2 stands here too.

    Args:
        chosen, rejected: [B], the denoiser's squared errors per dimension on both noised pictures of a pair, with one
            noise and one timestep.
        ref_chosen, ref_rejected: [B], the reference's.
        beta: the strength of the KL constraint.

    Returns:
        Losses [B], and the implicit rewards r [B] of chosen and of rejected pictures.
    """
    rewards = -beta / 2 * (chosen - ref_chosen), -beta / 2 * (rejected - ref_rejected)
    return -logsigmoid(rewards[0] - rewards[1]), *rewards
