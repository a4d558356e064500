from .formulas.advantages import group_centred as group_centred, group_whitened as group_whitened
from .formulas.kl import AdaptiveKLController as AdaptiveKLController, FixedKLController as FixedKLController
from .formulas.masking import (
    explained_variance as explained_variance,
    masked_mean as masked_mean,
    masked_var as masked_var,
    rescale as rescale,
    whiten as whiten,
)
from .formulas.surrogate import clipped_surrogate as clipped_surrogate, surrogate_stats as surrogate_stats
from .seeding import set_seed as set_seed
from .stats import RunningMoments as RunningMoments, gather_stats as gather_stats
