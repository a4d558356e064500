"""The logged statistics of labelled answers."""

import math
from collections.abc import Mapping

from torch import Tensor

from trimtab_common.stats import Mean

from .algorithm import Judged


def unpaired_statistics(judged: Judged, labels: Tensor, *, count: int | None = None) -> dict[str, Mean]:
    """The loss and z0, and the means of each label: chosen is desirable, rejected is undesirable.

    Args:
        labels: [B], True where the answer is desirable.
        count: how many of the B answers are real; None: all.
    """
    scores, losses = judged.scores, judged.losses[:count]
    stats = {"loss": Mean.of(losses), "kl": Mean(judged.kl * len(losses), len(losses))}
    for side, mask in (("chosen", labels[:count]), ("rejected", ~labels[:count])):
        stats[f"rewards/{side}"] = Mean.of(judged.rewards[:count], mask)
        stats[f"logps/{side}"] = Mean.of(scores.logps[:count], mask)
        tokens = Mean.of(scores.lengths[:count], mask).total
        stats[f"entropy/{side}"] = Mean(Mean.of(scores.entropy[:count], mask).total, tokens)
    return stats


def with_margins(stats: Mapping[str, float]) -> dict[str, float]:
    """Adds rewards/margins, the difference of the two means, and removes the means of a label that no answer had."""
    kept = {name: value for name, value in stats.items() if "/" not in name or not math.isnan(value)}
    if {"rewards/chosen", "rewards/rejected"} <= kept.keys():
        kept["rewards/margins"] = kept["rewards/chosen"] - kept["rewards/rejected"]
    return kept
