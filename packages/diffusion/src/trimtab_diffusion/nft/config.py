"""Configuration of DiffusionNFT."""

from dataclasses import dataclass

from trimtab_common.config import Count, CountFromZero, Decay, Finite, NotNegative, Positive, Share, setting
from trimtab_diffusion.training import config as shared

WITHOUT_EFFECT = shared.WITHOUT_EFFECT
"""Settings that change no result."""


@dataclass
class DiffusionNFTConfig(shared.SamplingConfig):
    """Settings of DiffusionNFT (Zheng et al. 2025, arXiv:2509.16117). Sizes count samples on one process.

    Raises:
        ValueError: a setting is out of its range, or does not go with another. The trainer checks once more.
    """

    sample_num_steps: Count = setting("Denoising steps of a sample.", default=10)
    sample_eta: NotNegative = setting(
        "Noise of the steps: DDIM's eta; for flow matching the a of Flow-GRPO. 0: an ODE.", default=0.0
    )
    sample_guidance_scale: Finite = setting(
        "Scale of guidance, classifier-free unless embedded, in sampling and training; 1: none.", default=1.0
    )
    train_batch_size: Count = setting("(sample, noise level) pairs of a backward pass.", default=8)
    train_gradient_accumulation_steps: Count = setting("An update's samples / train_batch_size.", default=6)
    sample_batch_size: Count = setting("Samples at a time.", default=24)
    sample_num_batches_per_epoch: Count = setting("Sampling batches of an epoch.", default=2)
    group_size: Count = setting("Samples per drawn prompt; rewards are relative to their mean.", default=24)
    train_num_inner_epochs: Count = setting("Passes over an epoch's samples.", default=1)
    train_timestep_fraction: Share = setting(
        "Share of the noise levels, at random, at which a sample trains.", default=1
    )
    train_adv_clip_max: Positive = setting("The advantage from which a sample's optimality is 1.", default=5)
    beta: Positive = setting("Inverse of the guidance's strength; the paper: 1, or 0.1 for speed.", default=1.0)
    adaptive_weights: bool = setting("Errors of x_0 over their size, not of the denoiser's output.", default=True)
    kl_coef: NotNegative = setting("Coefficient of the squared distance to the initial denoiser.", default=1e-4)
    old_decay_rate: NotNegative = setting("Growth of the sampling policy's decay in an epoch.", default=0.001)
    old_decay_max: Decay = setting("Bound of this decay; 0: sample with the trained weights.", default=0.5)
    old_decay_start: CountFromZero = setting("Epochs after which this decay grows from 0.", default=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples_per_epoch % self.samples_per_update:
            raise ValueError(
                f"The {self.samples_per_epoch} samples of an epoch (sample_batch_size x sample_num_batches_per_epoch) "
                f"do not split into updates of {self.samples_per_update} (train_batch_size x "
                "train_gradient_accumulation_steps). Change one of the four."
            )
        if self.group_size < 2 or self.samples_per_epoch % self.group_size:
            raise ValueError(
                f"group_size={self.group_size}: rewards are compared within a prompt, so use 2 or more, and a divisor "
                f"of an epoch's {self.samples_per_epoch} samples."
            )
        if self.trained_levels < 1:
            raise ValueError(
                f"train_timestep_fraction={self.train_timestep_fraction} of sample_num_steps={self.sample_num_steps} "
                f"is less than one level: nothing would train. Use at least {1 / self.sample_num_steps:.3g}."
            )

    @property
    def samples_per_epoch(self) -> int:
        """Samples of an epoch."""
        return self.sample_batch_size * self.sample_num_batches_per_epoch

    @property
    def trained_levels(self) -> int:
        """Noise levels at which a sample trains, among those of the sampling steps."""
        return int(self.sample_num_steps * self.train_timestep_fraction + 1e-9)
