"""The statistics of an epoch that its health is judged by."""

from collections.abc import Mapping

from trimtab_common.conditions import Vitals

from .config import DDPOConfig


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
