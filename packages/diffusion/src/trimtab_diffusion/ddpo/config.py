"""Configuration of DDPO."""

import math
from dataclasses import dataclass, field
from typing import Any

from trimtab_common.config import script_name
from trimtab_common.tracking import check_tracker_name

ESTIMATORS = ("is", "sf", "rwr", "rwr_sparse")
STORAGE = (None, "float32", "float16", "bfloat16")
PRECISIONS = ("no", "fp16", "bf16", None)


def _help(text: str, **default: Any) -> Any:
    return field(**default, metadata={"help": text})


@dataclass
class DDPOConfig:
    """DDPO (Black et al. 2023, arXiv:2305.13301). Checked when it is made, and once more by the trainer.

    Sizes count pictures on one process.
    """

    exp_name: str = _help("Name of the run in the tracker.", default_factory=script_name)
    run_name: str | None = _help("Name of the run in the tracker, in place of exp_name.", default="")
    seed: int = _help("Seed of prompts, pictures and the order of training.", default=0)
    log_with: str | None = _help("Tracker: wandb (offline without an account), tensorboard or none.", default=None)
    tracker_kwargs: dict[str, Any] = _help("Arguments of wandb.init or SummaryWriter.", default_factory=dict)
    accelerator_kwargs: dict[str, Any] = _help("Arguments of accelerate.Accelerator.", default_factory=dict)
    project_kwargs: dict[str, Any] = _help(
        "Arguments of accelerate's ProjectConfiguration: checkpoints go to project_dir/checkpoints (else "
        "logdir/checkpoints), the tracker to logging_dir (else project_dir, else logdir); total_limit counts like "
        "num_checkpoint_limit.",
        default_factory=dict,
    )
    tracker_project_name: str = _help("Project in the tracker.", default="trl")
    logdir: str = _help("Folder of the tracker's files and of checkpoints.", default="logs")
    num_epochs: int = _help("Epochs of `train`: each samples pictures and learns from them.", default=100)
    save_freq: int = _help("`train` saves a checkpoint every so many epochs.", default=1)
    num_checkpoint_limit: int = _help("Checkpoints kept; older ones are removed.", default=5)
    mixed_precision: str | None = _help(
        "fp16, bf16 or no: the frozen parts' dtype, and autocast of what trains, which stays float32. On a CPU fp16 "
        "becomes no, with a warning. None: what accelerate launch says, else no.",
        default="fp16",
    )
    allow_tf32: bool = _help("Let a GPU multiply float32 matrices in TF32.", default=True)
    resume_from: str | None = _help(
        "Checkpoint to go on from: its folder, one that holds several, or latest for the newest of this run's.",
        default="",
    )
    sample_num_steps: int = _help("Denoising steps of a picture.", default=50)
    sample_eta: float = _help("Noise of the steps: DDIM's eta; for flow matching the a of Flow-GRPO.", default=1.0)
    sample_guidance_scale: float = _help("Scale of classifier-free guidance; 1 or less is none.", default=5.0)
    sample_batch_size: int = _help("Pictures drawn at a time.", default=1)
    sample_num_batches_per_epoch: int = _help("Times that an epoch draws.", default=2)
    train_batch_size: int = _help("(picture, step) pairs of a forward and backward pass.", default=1)
    train_use_8bit_adam: bool = _help("AdamW with 8-bit moments (needs bitsandbytes).", default=False)
    train_learning_rate: float = _help("AdamW's learning rate.", default=3e-4)
    train_adam_beta1: float = _help("AdamW's beta 1.", default=0.9)
    train_adam_beta2: float = _help("AdamW's beta 2.", default=0.999)
    train_adam_weight_decay: float = _help("AdamW's weight decay.", default=1e-4)
    train_adam_epsilon: float = _help("AdamW's epsilon.", default=1e-8)
    train_gradient_accumulation_steps: int = _help(
        "An optimizer step learns from train_batch_size times this many pictures, all their trained steps included.",
        default=1,
    )
    train_max_grad_norm: float = _help("Clip the gradient's norm to this at every update.", default=1.0)
    train_num_inner_epochs: int = _help("Passes over an epoch's pictures.", default=1)
    train_cfg: bool = _help("Train with guidance, as pictures are drawn with it.", default=True)
    train_adv_clip_max: float = _help("Clip advantages to +- this.", default=5)
    train_clip_range: float = _help(
        "Keep the ratio of probabilities per dimension within 1 +- this; times the dimensions it is in nats.",
        default=1e-4,
    )
    train_timestep_fraction: float = _help("Share of a picture's steps, drawn anew, that is trained on.", default=1.0)
    per_prompt_stat_tracking: bool = _help(
        "Advantages against earlier rewards of the same prompt, not against the epoch's.", default=False
    )
    per_prompt_stat_tracking_buffer_size: int = _help("Rewards of a prompt that are remembered.", default=16)
    per_prompt_stat_tracking_min_count: int = _help(
        "Rewards that a prompt needs before they are its measure.", default=16
    )
    async_reward_computation: bool = _help(
        "Compute rewards in threads while the next pictures are drawn.", default=False
    )
    max_workers: int = _help("Threads of async_reward_computation.", default=2)
    negative_prompts: str | None = _help("What guidance leads away from, for every picture.", default="")

    estimator: str = _help(
        "is: clipped importance sampling; sf: score function, one update per epoch; rwr, rwr_sparse: reward-weighted "
        "regression.",
        default="is",
    )
    group_size: int = _help(
        "Pictures of each prompt that is drawn; above 1 advantages are against the others of the group (GRPO).",
        default=1,
    )
    rwr_beta: float = _help("rwr: inverse temperature of its weights; 0 trains on all pictures alike.", default=0.2)
    rwr_top: float = _help("rwr_sparse: share of pictures, the best, that is trained on.", default=0.1)
    train_clip_range_nats: float | None = _help(
        "The clip range as nats of a step's joint probability, whatever the latents' size; in place of "
        "train_clip_range.",
        default=None,
    )
    train_warmup_steps: int = _help(
        "Updates over which the learning rate rises from 0: Adam's first steps leave any trust region.", default=0
    )
    train_gradient_checkpointing: bool = _help(
        "Compute activations again in the backward pass: less memory, a third more time.", default=False
    )
    init_kl_coef: float = _help(
        "Coefficient of the KL penalty to the model without its adapters, or, trained whole, as it was; 0: none.",
        default=0,
    )
    adap_kl_ctrl: bool = _help("Move the coefficient until the KL meets `target`.", default=False)
    target: float = _help("KL that the adaptive controller aims at, in nats per picture.", default=6)
    horizon: float = _help("Pictures over which the adaptive controller corrects an error.", default=10000)
    trajectory_dtype: str | None = _help(
        "float32, float16 or bfloat16: latents are rounded to it as they are drawn, and kept so; None: as they are.",
        default=None,
    )
    trajectory_on_cpu: bool = _help("Keep trajectories in the host's memory.", default=False)
    resume_with_changes: bool = _help(
        "Resume although settings differ from the checkpoint's, with a warning that lists them; else an error.",
        default=False,
    )

    def __post_init__(self) -> None:
        check_tracker_name(self.log_with)
        self._check_numbers()
        self._check_choices()
        if self.trained_steps < 1:
            raise ValueError(
                f"train_timestep_fraction={self.train_timestep_fraction} of sample_num_steps={self.sample_num_steps} "
                f"is less than one step: nothing would train. Use at least {1 / self.sample_num_steps:.3g}."
            )
        self._check_sizes()
        if self.is_guided and not self.train_cfg:
            raise ValueError(
                f"sample_guidance_scale={self.sample_guidance_scale} with train_cfg=False would draw from one policy "
                "and train another. Set train_cfg=True, or sample_guidance_scale=1."
            )
        if self.estimator == "sf" and self.updates_per_epoch > 1:
            raise ValueError(
                f"estimator='sf' is right for the policy that drew the pictures alone, and this makes "
                f"{self.updates_per_epoch} updates per epoch. Set train_batch_size * train_gradient_accumulation_steps "
                f"= {self.samples_per_epoch} and train_num_inner_epochs=1, or estimator='is'."
            )
        if self.group_size > 1 and self.per_prompt_stat_tracking:
            raise ValueError("group_size above 1 and per_prompt_stat_tracking are two measures of a reward: use one.")

    @property
    def samples_per_epoch(self) -> int:
        """Pictures that an epoch draws."""
        return self.sample_batch_size * self.sample_num_batches_per_epoch

    @property
    def samples_per_update(self) -> int:
        """Pictures that an optimizer step learns from."""
        return self.train_batch_size * self.train_gradient_accumulation_steps

    @property
    def updates_per_epoch(self) -> int:
        return self.samples_per_epoch // self.samples_per_update * self.train_num_inner_epochs

    @property
    def trained_steps(self) -> int:
        """Steps of a picture that are trained on."""
        return int(self.sample_num_steps * self.train_timestep_fraction + 1e-9)

    @property
    def is_guided(self) -> bool:
        return self.sample_guidance_scale > 1

    def _check_numbers(self) -> None:
        whole = [
            "num_epochs", "save_freq", "num_checkpoint_limit", "sample_num_steps", "sample_batch_size",
            "sample_num_batches_per_epoch", "train_batch_size", "train_gradient_accumulation_steps",
            "train_num_inner_epochs", "per_prompt_stat_tracking_buffer_size", "per_prompt_stat_tracking_min_count",
            "max_workers", "group_size",
        ]  # fmt: skip
        for name in whole:
            if getattr(self, name) < 1 or int(getattr(self, name)) != getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)} must be a whole number of at least 1.")
        positive = ["train_learning_rate", "train_max_grad_norm", "train_adv_clip_max", "train_clip_range", "target"]
        positive += ["sample_eta", "horizon", "train_adam_epsilon"]
        positive += ["train_clip_range_nats"] if self.train_clip_range_nats is not None else []
        for name in positive:
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number above 0.")
        for name in ("train_adam_weight_decay", "rwr_beta", "init_kl_coef", "train_warmup_steps"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number, 0 or above.")
        for name in ("train_adam_beta1", "train_adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie from 0 to below 1.")
        for name in ("train_timestep_fraction", "rwr_top"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie above 0 and up to 1.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed} is outside [0, 2**32), the range NumPy takes. Choose a seed within it.")
        if self.per_prompt_stat_tracking_min_count > self.per_prompt_stat_tracking_buffer_size:
            raise ValueError(
                f"per_prompt_stat_tracking_min_count={self.per_prompt_stat_tracking_min_count} rewards never fit into "
                f"a buffer of {self.per_prompt_stat_tracking_buffer_size}: make the buffer larger."
            )

    def _check_choices(self) -> None:
        for name, choices in (
            ("estimator", ESTIMATORS), ("trajectory_dtype", STORAGE), ("mixed_precision", PRECISIONS),
        ):  # fmt: skip
            if getattr(self, name) not in choices:
                known = ", ".join(str(choice) for choice in choices)
                raise ValueError(f"{name}={getattr(self, name)!r} is none of {known}.")
        if self.init_kl_coef and self.estimator.startswith("rwr"):
            raise ValueError(
                "init_kl_coef penalises the steps of DDPO; reward-weighted regression has none. Set it to 0."
            )
        if self.adap_kl_ctrl and not self.init_kl_coef:
            raise ValueError("adap_kl_ctrl multiplies the coefficient, and init_kl_coef=0 stays 0: start above it.")
        if "gradient_accumulation_steps" in self.accelerator_kwargs:
            raise ValueError(
                "accelerator_kwargs with gradient_accumulation_steps would divide the loss a second time. "
                "Set train_gradient_accumulation_steps instead."
            )

    def _check_sizes(self) -> None:
        if self.samples_per_epoch % self.samples_per_update:
            fitting = [n for n in range(1, self.samples_per_epoch + 1) if self.samples_per_epoch % n == 0]
            raise ValueError(
                f"sample_batch_size {self.sample_batch_size} x sample_num_batches_per_epoch "
                f"{self.sample_num_batches_per_epoch} = {self.samples_per_epoch} pictures do not split into updates of "
                f"train_batch_size {self.train_batch_size} x train_gradient_accumulation_steps "
                f"{self.train_gradient_accumulation_steps} = {self.samples_per_update}. Make that product one of "
                f"{', '.join(map(str, fitting))}."
            )
        if self.sample_batch_size % self.group_size:
            fitting = [n for n in range(1, self.sample_batch_size + 1) if self.sample_batch_size % n == 0]
            raise ValueError(
                f"group_size={self.group_size} does not divide sample_batch_size={self.sample_batch_size}: a group "
                f"would be cut. Use one of {', '.join(map(str, fitting))}, or another sample_batch_size."
            )
