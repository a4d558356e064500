"""Configuration of AlignProp."""

from dataclasses import dataclass
from numbers import Integral

from trimtab_common.config import Count, CountFromZero, NotNegative, Positive, setting
from trimtab_diffusion.training import config as shared

WITHOUT_EFFECT = (*shared.WITHOUT_EFFECT, "log_image_freq")
"""Settings that change no result."""


@dataclass
class AlignPropConfig(shared.SamplingConfig):
    """Settings of AlignProp (Prabhudesai et al. 2023, arXiv:2310.03739) and DRaFT (Clark et al., arXiv:2309.17400).

    An epoch is one update. Sizes count samples on one process.

    Raises:
        ValueError: a setting is out of its range, or does not go with another. The trainer checks once more.
    """

    sample_eta: NotNegative = setting(
        "Noise of the steps: DDIM's eta; for flow matching the a of Flow-GRPO. 0: an ODE.", default=1.0
    )
    train_learning_rate: Positive = setting("AdamW's learning rate.", default=1e-3)
    negative_prompts: str | None = setting("The prompt that guidance leads away from.", default=None)
    log_image_freq: Count = setting("`image_samples_hook` is called every so many updates.", default=1)
    truncated_backprop_rand: bool = setting("Draw the first step with a gradient anew at every update.", default=True)
    truncated_backprop_timestep: CountFromZero = setting(
        "Without truncated_backprop_rand: the first step with a gradient, from 0. The paper of DRaFT names how many "
        "have one, K = sample_num_steps - this.",
        default=49,
    )
    truncated_rand_backprop_minmax: tuple[int, int] = setting(
        "With truncated_backprop_rand: bounds of the first step with a gradient. The last step always has one.",
        default=(0, 50),
    )
    low_variance_samples: CountFromZero = setting(
        "DRaFT-LV, for K = 1: noise each image again this often before its last step (the paper: 2). 0: do not.",
        default=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        bounds = self.truncated_rand_backprop_minmax
        are_two = len(bounds) == 2 and all(isinstance(bound, Integral) for bound in bounds)
        if not (are_two and 0 <= bounds[0] <= bounds[1]):
            raise ValueError(
                f"truncated_rand_backprop_minmax={bounds}: two whole numbers are needed, the first 0 or above and not "
                "larger than the second."
            )
        low, _ = bounds
        last = self.sample_num_steps - 1
        fixed = None if self.truncated_backprop_rand else self.truncated_backprop_timestep
        if (low if fixed is None else fixed) > last:
            name = "truncated_rand_backprop_minmax" if fixed is None else "truncated_backprop_timestep"
            raise ValueError(
                f"{name}={getattr(self, name)} is beyond the last step, {last}, of sample_num_steps="
                f"{self.sample_num_steps}: no step would have a gradient. Use at most {last}."
            )
        if self.low_variance_samples and fixed != last:
            raise ValueError(
                f"low_variance_samples={self.low_variance_samples} concerns a gradient through the last step alone. "
                f"Set truncated_backprop_rand=False and truncated_backprop_timestep={last}, or leave it 0."
            )
