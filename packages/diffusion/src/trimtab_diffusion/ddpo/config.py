"""Configuration of DDPO."""

from dataclasses import dataclass

from trimtab_common.config import Count, CountFromZero, NotNegative, Positive, Share, setting
from trimtab_diffusion.training import config as shared

ESTIMATORS = ("is", "sf", "rwr", "rwr_sparse")
SCALES = ("group", "batch")
STORAGE = (None, "float32", "float16", "bfloat16")
WITHOUT_EFFECT = (*shared.WITHOUT_EFFECT, "max_workers", "async_reward_computation", "trajectory_on_cpu", "eval_*")
"""Settings that change no result."""
HELD = (*shared.HELD, "init_kl_coef")
"""Settings whose values the optimizer and the KL controller bring along from a checkpoint."""


@dataclass
class DDPOConfig(shared.SamplingConfig):
    """Settings of DDPO (Black et al. 2023, arXiv:2305.13301). Sizes count samples on one process.

    Raises:
        ValueError: a setting is out of its range, or does not go with another. The trainer checks once more.
    """

    sample_batch_size: Count = setting("Samples at a time.", default=1)
    sample_num_batches_per_epoch: Count = setting("Sampling batches of an epoch.", default=2)
    train_num_inner_epochs: Count = setting("Passes over an epoch's samples.", default=1)
    train_cfg: bool = setting("Train with guidance, with which images are sampled.", default=True)
    train_adv_clip_max: Positive = setting("is, sf: clip advantages to +- this.", default=5)
    train_clip_range: Positive = setting("is: clip the ratio per dimension of the latents to 1 +- this.", default=1e-4)
    train_timestep_fraction: Share = setting(
        "Share of all of a sample's steps, at random, that trains; with sample_window at most the window's steps.",
        default=1.0,
    )
    per_prompt_stat_tracking: bool = setting("Advantages relative to the prompt's latest rewards.", default=False)
    per_prompt_stat_tracking_buffer_size: Count = setting("Latest rewards of each prompt that are kept.", default=16)
    per_prompt_stat_tracking_min_count: Count = setting("Rewards that a prompt needs; else the epoch's.", default=16)
    async_reward_computation: bool = setting("Compute rewards in threads during sampling.", default=False)
    max_workers: Count = setting("Threads of async_reward_computation.", default=2)

    sample_window: CountFromZero = setting(
        "Steps of a sample that are random and train, the others being deterministic (MixGRPO). 0: all.", default=0
    )
    sample_window_interval: CountFromZero = setting(
        "Epochs after which this window moves on by a step. 0: it stays at the first steps.", default=25
    )
    eval_freq: CountFromZero = setting(
        "`train` evaluates every so many epochs, on `eval_prompts`. 0: never.", default=0
    )
    eval_num_steps: Count | None = setting("Steps of an evaluation's samples. None: sample_num_steps.", default=None)
    estimator: str = setting("is: importance sampling; sf: score function; rwr, rwr_sparse: regression.", default="is")
    group_size: Count = setting("Samples per drawn prompt; above 1, advantages are relative to them.", default=1)
    scale_rewards: str = setting(
        "Divide advantages by the deviation of the group, or of the whole epoch of all processes (batch).",
        default="group",
    )
    rwr_beta: NotNegative = setting("rwr: inverse temperature of the weights; 0: equal weights.", default=0.2)
    rwr_top: Share = setting("rwr_sparse: share of the samples, the best, that trains.", default=0.1)
    train_clip_range_nats: Positive | None = setting(
        "Clip range of a step's joint probability, in nats, in place of train_clip_range. None: train_clip_range.",
        default=None,
    )
    init_kl_coef: NotNegative = setting("Coefficient of the KL penalty to the initial policy.", default=0)
    adap_kl_ctrl: bool = setting("Move the coefficient until the KL meets `target`.", default=False)
    target: Positive = setting("KL that the adaptive controller aims at, in nats per sample.", default=6)
    horizon: Positive = setting("Samples over which the adaptive controller corrects an error.", default=10000)
    trajectory_dtype: str | None = setting(
        "Round latents to float32, float16 or bfloat16. None: no rounding.", default=None
    )
    trajectory_on_cpu: bool = setting("Keep trajectories in the host's memory.", default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choices()
        self._check_sizes()
        self._check_objective()

    @property
    def samples_per_epoch(self) -> int:
        """Samples of an epoch."""
        return self.sample_batch_size * self.sample_num_batches_per_epoch

    @property
    def updates_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return self.samples_per_epoch // self.samples_per_update * self.train_num_inner_epochs

    @property
    def trained_steps(self) -> int:
        """Trained steps per sample, where as many have noise."""
        share = int(self.sample_num_steps * self.train_timestep_fraction + 1e-9)
        return min(share, self.sample_window or share)

    @property
    def is_regression(self) -> bool:
        """Whether the estimator is reward-weighted regression, which has no ratios and no KL."""
        return self.estimator.startswith("rwr")

    def clip_range(self, dimensions: int) -> float:
        """The clip range of ratios per dimension, 1 +- this, for latents with `dimensions` numbers."""
        return self.train_clip_range if self.train_clip_range_nats is None else self.train_clip_range_nats / dimensions

    def _check_choices(self) -> None:
        choices = {"estimator": ESTIMATORS, "scale_rewards": SCALES, "trajectory_dtype": STORAGE}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is none of {', '.join(map(str, known))}.")

    def _check_sizes(self) -> None:
        if self.samples_per_epoch % self.samples_per_update:
            raise ValueError(
                f"sample_batch_size {self.sample_batch_size} x sample_num_batches_per_epoch "
                f"{self.sample_num_batches_per_epoch} = {self.samples_per_epoch} samples do not split into updates of "
                f"train_batch_size {self.train_batch_size} x train_gradient_accumulation_steps "
                f"{self.train_gradient_accumulation_steps} = {self.samples_per_update}. Make that product one of "
                f"{_divisors(self.samples_per_epoch)}."
            )
        if self.samples_per_epoch % self.group_size:
            raise ValueError(
                f"group_size={self.group_size} does not divide sample_batch_size {self.sample_batch_size} x "
                f"sample_num_batches_per_epoch {self.sample_num_batches_per_epoch} = {self.samples_per_epoch}: a group "
                f"would be cut. Use one of {_divisors(self.samples_per_epoch)}, or other sizes."
            )
        if self.trained_steps < 1:
            raise ValueError(
                f"train_timestep_fraction={self.train_timestep_fraction} of sample_num_steps={self.sample_num_steps} "
                f"is less than one step: nothing would train. Use at least {1 / self.sample_num_steps:.3g}."
            )
        if self.sample_window > self.sample_num_steps:
            raise ValueError(
                f"sample_window={self.sample_window} is more than sample_num_steps={self.sample_num_steps}. Use at "
                "most that, or 0 for all steps."
            )
        if self.per_prompt_stat_tracking_min_count > self.per_prompt_stat_tracking_buffer_size:
            raise ValueError(
                f"per_prompt_stat_tracking_min_count={self.per_prompt_stat_tracking_min_count} rewards never fit into "
                f"a buffer of {self.per_prompt_stat_tracking_buffer_size}: make the buffer larger."
            )

    def _check_objective(self) -> None:
        if self.is_guided and not self.train_cfg:
            raise ValueError(
                f"sample_guidance_scale={self.sample_guidance_scale} with train_cfg=False would sample from one policy "
                "and train another. Set train_cfg=True, or sample_guidance_scale=1."
            )
        if self.estimator == "sf" and self.updates_per_epoch > 1:
            raise ValueError(
                f"estimator='sf' is right only for the policy that sampled, and this makes "
                f"{self.updates_per_epoch} updates per epoch. Set train_batch_size * train_gradient_accumulation_steps "
                f"= {self.samples_per_epoch} and train_num_inner_epochs=1, or estimator='is'."
            )
        if self.group_size > 1 and self.per_prompt_stat_tracking:
            raise ValueError("group_size above 1 and per_prompt_stat_tracking are two measures of a reward: use one.")
        if self.is_regression and self.per_prompt_stat_tracking:
            raise ValueError(
                f"per_prompt_stat_tracking gives advantages, and estimator={self.estimator!r} has weights of its own. "
                "Set per_prompt_stat_tracking=False, or estimator='is'."
            )
        if self.scale_rewards == "batch" and (self.per_prompt_stat_tracking or self.is_regression):
            raise ValueError(
                "scale_rewards='batch' scales advantages over groups or the epoch; per_prompt_stat_tracking and "
                "reward-weighted regression have rules of their own. Set it to 'group'."
            )
        if self.init_kl_coef and self.is_regression:
            raise ValueError(
                "init_kl_coef penalises a policy's steps; reward-weighted regression has none. Set it to 0."
            )
        if self.adap_kl_ctrl and not self.init_kl_coef:
            raise ValueError("adap_kl_ctrl multiplies the coefficient, and init_kl_coef=0 stays 0: start above it.")


def _divisors(count: int) -> str:
    return ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
