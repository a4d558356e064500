"""Configuration of Diffusion-DPO."""

from dataclasses import dataclass

from trimtab_common.config import Count, Positive, setting
from trimtab_diffusion.training.config import PipelineConfig


@dataclass
class DiffusionDPOConfig(PipelineConfig):
    """Settings of Diffusion-DPO (Wallace et al. 2023, arXiv:2311.12908). Sizes count pairs on one process.

    Raises:
        ValueError: a setting is out of its range. The trainer checks once more.
    """

    num_epochs: Count = setting("Passes of `train` over the pairs.", default=1)
    train_batch_size: Count = setting("Pairs of a backward pass.", default=1)
    train_learning_rate: Positive = setting("AdamW's learning rate.", default=1e-5)
    beta: Positive = setting("The paper's beta T: how hard it is to leave the reference.", default=5000)
    encode_batch_size: Count = setting("Pairs that are encoded at a time, before training.", default=8)
    precompute_ref_errors: bool = setting(
        "The reference predicts at the start of each epoch, for all of its noised pairs, and is on the CPU for the "
        "rest: for training without adapters, which needs a frozen copy.",
        default=False,
    )
