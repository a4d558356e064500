"""What policy optimization needs whatever the policy is: KL control, surrogates, statistics, checkpoints, tracking."""

from trimtab_common.formulas.advantages import group_centred, group_whitened
from trimtab_common.formulas.kl import AdaptiveKLController, FixedKLController
from trimtab_common.formulas.masking import explained_variance, masked_mean, masked_var, rescale, whiten
from trimtab_common.formulas.surrogate import clipped_surrogate, surrogate_stats
from trimtab_common.seeding import set_seed
from trimtab_common.stats import RunningMoments, gather_stats

__all__ = [
    "AdaptiveKLController",
    "FixedKLController",
    "RunningMoments",
    "clipped_surrogate",
    "explained_variance",
    "gather_stats",
    "group_centred",
    "group_whitened",
    "masked_mean",
    "masked_var",
    "rescale",
    "set_seed",
    "surrogate_stats",
    "whiten",
]
