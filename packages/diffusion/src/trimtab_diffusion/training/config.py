"""The settings that all trainers of diffusion pipelines share."""

from dataclasses import dataclass
from typing import Any

from trimtab_common.config import (
    Count,
    CountFromZero,
    Decay,
    Finite,
    NotNegative,
    Positive,
    check_ranges,
    flattened,
    script_name,
    setting,
)
from trimtab_common.sealing import ON_SAVE_ERROR, OnSaveError
from trimtab_common.time_limit import REWARD_TIMEOUT
from trimtab_common.tracking import check_tracker_name

PRECISIONS = ("no", "fp16", "bf16", None)
WITHOUT_EFFECT = (
    *("exp_name", "run_name", "log_with", "tracker_*", "project_kwargs", "logdir", "num_epochs", "save_freq"),
    *("num_checkpoint_limit", "resume_*", "train_gradient_checkpointing"),
    *("train_compile", "train_channels_last", "reward_timeout"),
    "on_save_error",
)
"""Settings that change no result."""
HELD = ("train_learning_rate", "train_adam_*")
"""Settings whose values the optimizer brings along from a checkpoint."""


@dataclass
class PipelineConfig:
    """Settings of a run that trains the denoiser of a diffusers pipeline. Sizes count samples on one process.

    Raises:
        ValueError: a setting is out of its range, or does not go with another. The trainer checks once more.
    """

    exp_name: str = setting("Name of the run in the tracker.", default_factory=script_name)
    run_name: str | None = setting("Name of the run in the tracker, in place of exp_name.", default="")
    seed: int = setting("Seed of prompts, samples and the order of training.", default=0)
    log_with: str | None = setting(
        "Tracker: aim, comet_ml, mlflow, tensorboard, wandb, clearml, dvclive, swanlab, trackio, none.", default=None
    )
    tracker_kwargs: dict[str, Any] = setting("Arguments of wandb.init or SummaryWriter.", default_factory=dict)
    accelerator_kwargs: dict[str, Any] = setting("Arguments of accelerate.Accelerator.", default_factory=dict)
    project_kwargs: dict[str, Any] = setting("Arguments of accelerate's ProjectConfiguration.", default_factory=dict)
    tracker_project_name: str = setting("Project in the tracker.", default="trl")
    logdir: str = setting("Folder of the tracker's files and of checkpoints.", default="logs")
    num_epochs: Count = setting("Epochs of `train`: each samples images, or passes over pairs of them.", default=100)
    save_freq: Count = setting("`train` saves a checkpoint every so many epochs.", default=1)
    num_checkpoint_limit: Count = setting("Checkpoints kept; older ones are removed.", default=5)
    mixed_precision: str | None = setting("fp16, bf16, no; None: what accelerate launch says.", default="fp16")
    allow_tf32: bool = setting("Let a GPU multiply float32 matrices in TF32.", default=True)
    resume_from: str | None = setting("Checkpoint to resume: its folder, its parent's, or latest.", default="")
    train_batch_size: Count = setting("Samples, in DDPO (sample, step) pairs, of a backward pass.", default=1)
    train_use_8bit_adam: bool = setting("AdamW with 8-bit moments (needs bitsandbytes).", default=False)
    train_learning_rate: Positive = setting("AdamW's learning rate.", default=3e-4)
    train_adam_beta1: Decay = setting("AdamW's beta 1.", default=0.9)
    train_adam_beta2: Decay = setting("AdamW's beta 2.", default=0.999)
    train_adam_weight_decay: NotNegative = setting("AdamW's weight decay.", default=1e-4)
    train_adam_epsilon: Positive = setting("AdamW's epsilon.", default=1e-8)
    train_gradient_accumulation_steps: Count = setting("An update's samples / train_batch_size.", default=1)
    train_max_grad_norm: Positive = setting("Clip the gradient's norm to this at every update.", default=1.0)
    train_warmup_steps: CountFromZero = setting("Updates over which the learning rate rises to its value.", default=0)
    train_gradient_checkpointing: bool = setting("Recompute activations in the backward pass.", default=False)
    train_compile: str | None = setting("Backend of torch.compile for the denoiser's blocks: inductor.", default=None)
    train_channels_last: bool = setting("Convolutions of the denoiser read channels last.", default=False)
    resume_with_changes: bool = setting("Resume with other settings, with a warning.", default=False)
    on_save_error: OnSaveError = setting(ON_SAVE_ERROR, default="raise")

    def __post_init__(self) -> None:
        check_tracker_name(self.log_with)
        check_ranges(self)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} is outside [0, 2**32), the range NumPy takes. Choose a seed within it.")
        if self.mixed_precision not in PRECISIONS:
            raise ValueError(f"mixed_precision={self.mixed_precision!r} is none of {', '.join(map(str, PRECISIONS))}.")
        if "gradient_accumulation_steps" in self.accelerator_kwargs:
            raise ValueError(
                "accelerator_kwargs with gradient_accumulation_steps would divide the loss a second time. "
                "Set train_gradient_accumulation_steps instead."
            )

    def to_dict(self) -> dict[str, Any]:
        """The fields by name; entries of a dict get names such as "tracker_kwargs/group"."""
        return flattened(vars(self))

    @property
    def samples_per_update(self) -> int:
        """Samples that an optimizer step learns from."""
        return self.train_batch_size * self.train_gradient_accumulation_steps


@dataclass
class SamplingConfig(PipelineConfig):
    """Settings of a run that learns from rewards of the images that it samples."""

    sample_num_steps: Count = setting("Denoising steps of a sample.", default=50)
    sample_eta: Positive = setting("Noise of the steps: DDIM's eta; for flow matching the a of Flow-GRPO.", default=1.0)
    sample_guidance_scale: Finite = setting("Scale of guidance, classifier-free unless embedded; 1: none.", default=5.0)
    negative_prompts: str | None = setting("The prompt that guidance leads away from.", default="")
    reward_timeout: NotNegative | None = setting(REWARD_TIMEOUT, default=600)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.negative_prompts and not self.is_guided:
            raise ValueError(
                f"negative_prompts={self.negative_prompts!r} needs guidance, and sample_guidance_scale="
                f"{self.sample_guidance_scale} is none. Set a scale above 1, or leave negative_prompts empty."
            )

    @property
    def is_guided(self) -> bool:
        """Whether there is classifier-free guidance."""
        return self.sample_guidance_scale > 1
