"""Configuration of PPO."""

import math
import warnings
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import Any, Literal

from trimtab_common.config import (
    Count,
    CountFromZero,
    Fraction,
    NotNegative,
    Positive,
    Seed,
    check_ranges,
    computed,
    flattened,
    script_name,
    setting,
)
from trimtab_common.formulas.kl import SAMPLED_KL, FixedKLController, kl_controller
from trimtab_common.sealing import ON_SAVE_ERROR, OnSaveError
from trimtab_common.time_limit import REWARD_TIMEOUT
from trimtab_common.tracking import check_tracker_name
from trimtab_lm.sampling.backends import BACKENDS


class _Computed(int):
    """A size that follows from others: a changed copy of the config computes it again."""


class _Taken:
    """Marks a config that is in use, without adding a field."""

    __slots__ = ("_is_taken",)
    _is_taken: bool


@dataclass
class PPOConfig(_Taken):
    """PPO with a value head (Ziegler et al. 2019, arXiv:1909.08593). Sizes count responses on one process.

    A config is checked when it is constructed. Its fields may be assigned until a trainer takes it: the trainer checks
    them again, computes the sizes that follow from others again, and keeps a copy that is fixed. To change a field of
    that, make a changed copy: `dataclasses.replace(trainer.config, learning_rate=1e-6)`.
    """

    exp_name: str = setting("Name of the run in the tracker.", default_factory=script_name)
    seed: Seed = setting("Seed of the shuffling and of the sampling in `generate`.", default=0)
    log_with: str | None = setting(
        "Tracker: aim, comet_ml, mlflow, tensorboard, wandb, clearml, dvclive, swanlab, trackio, none.", default=None
    )
    task_name: str | None = setting("Task, as a tag of the run in the tracker.", default=None)
    model_name: str | None = setting("Hub id or folder of the policy, if the trainer is given none.", default=None)
    query_dataset: str | None = setting("Hub id, folder or file of queries if the trainer is given none.", default=None)
    reward_model: str | None = setting("Hub id or folder of a classifier to score if `train` gets none.", default=None)
    remove_unused_columns: bool = setting("Drop columns other than model inputs, query, response, label.", default=True)
    tracker_kwargs: dict[str, Any] = setting("Arguments of wandb.init or SummaryWriter.", default_factory=dict)
    accelerator_kwargs: dict[str, Any] = setting("Arguments of accelerate.Accelerator.", default_factory=dict)
    project_kwargs: dict[str, Any] = setting(
        "Arguments of accelerate's ProjectConfiguration; the tracker writes into its logging_dir.",
        default_factory=dict,
    )
    tracker_project_name: str = setting("Project in the tracker.", default="trl")
    push_to_hub_if_best_kwargs: dict[str, Any] = setting(
        "Arguments of push_to_hub (repo_id at least): push whenever the mean score is the best so far.",
        default_factory=dict,
    )
    steps: Count = setting("PPO steps of `train`.", default=20000)
    learning_rate: Positive = setting("Learning rate of Adam.", default=1e-5)
    adap_kl_ctrl: bool = setting("Adapt the KL coefficient to `target`; else it stays at init_kl_coef.", default=True)
    init_kl_coef: NotNegative = setting("KL coefficient at the start.", default=0.2)
    kl_penalty: Literal["kl", "abs", "mse", "full", "k1", "k2", "k3"] = setting(
        "KL per token: kl = k1 (log-ratio), abs (its size), mse = k2 (half its square), k3, full (exact).",
        default="kl",
    )
    target: Positive | None = setting("KL that the adaptive controller aims at, in nats per response.", default=6)
    horizon: Positive | None = setting("Responses over which the adaptive controller corrects an error.", default=10000)
    gamma: Fraction = setting("Discount per token.", default=1)
    lam: Fraction = setting("Lambda of the generalised advantage estimate.", default=0.95)
    cliprange: Positive = setting("Keep pi / pi_old within 1 +- this.", default=0.2)
    cliprange_value: Positive = setting("Keep values within this of the rollout's values.", default=0.2)
    vf_coef: NotNegative = setting("Weight of the value loss.", default=0.1)
    batch_size: Count = setting("Responses per step, on one process.", default=256)
    forward_batch_size: int | None = setting("Deprecated name of mini_batch_size.", default=None)
    mini_batch_size: Count = setting("Responses per forward and backward pass.", default=1)
    gradient_accumulation_steps: Count = setting("Minibatches per optimizer step, weighed by tokens.", default=1)
    world_size: Count | None = computed("Number of processes; filled in by the trainer.")
    ppo_epochs: Count = setting("Passes over the batch in each step.", default=4)
    max_grad_norm: Positive | None = setting("Clip the gradient's norm to this at every update.", default=None)
    optimize_cuda_cache: bool | None = setting("Deprecated name of optimize_device_cache.", default=None)
    optimize_device_cache: bool | None = setting(
        "Free unused accelerator memory after each step: leaves more to other programs, slightly slower.",
        default=False,
    )
    early_stopping: bool = setting("End a step's updates when the policy moved by over 1.5 target_kl.", default=False)
    target_kl: Positive = setting("KL(old policy, policy) in nats per token, for early_stopping.", default=1)
    compare_steps: Count = setting("Steps between looks for the best score, for push_to_hub_if_best_kwargs.", default=1)
    ratio_threshold: Positive = setting("Leave a minibatch out of the update at a mean ratio above this.", default=10.0)
    use_score_scaling: bool = setting("Divide scores by their running standard deviation.", default=False)
    use_score_norm: bool = setting("Also subtract their running mean (needs use_score_scaling).", default=False)
    score_clip: Positive | None = setting("Clip scores to +- this, after scaling.", default=None)
    whiten_rewards: bool = setting("Scale rewards to variance 1 before the advantages; keep their mean.", default=False)
    is_encoder_decoder: bool | None = computed("Filled in by the trainer from the model; an error if it differs.")
    is_peft_model: bool | None = computed("Filled in by the trainer from the model; an error if it differs.")
    backward_batch_size: int | None = computed("Responses per optimizer step on one process; computed.")
    global_backward_batch_size: int | None = computed("The same over all processes; computed.")
    global_batch_size: int | None = computed("Responses per step over all processes; computed.")
    total_ppo_epochs: int | None = computed("Deprecated: steps / batch_size, rounded up; computed.")
    temperature: Positive | None = setting(
        "Sampling temperature of the responses. None: the temperature of the last `generate`.", default=None
    )
    missing_eos_penalty: NotNegative | None = setting(
        "Subtracted from the score of a response that does not end with an end token.", default=None
    )
    output_dir: str | None = setting("Folder of checkpoints.", default=None)
    save_steps: Count | None = setting("`train` saves a checkpoint every so many steps, in output_dir.", default=None)
    save_total_limit: Count | None = setting("Checkpoints kept; older ones are removed. None: all.", default=None)
    resume_with_changes: bool = setting(
        "Resume although settings or data differ from the checkpoint's, with a warning that lists them; else an error.",
        default=False,
    )

    rollout_backend: Literal["transformers", "continuous_batching", "vllm", "vllm_server"] = setting(
        "What samples in `train`: transformers (generate), continuous_batching (transformers' own engine), vllm (its "
        "engine in this process) or vllm_server.",
        default="transformers",
    )
    rollout_backend_kwargs: dict[str, Any] | None = setting(
        "Settings of the sampler: arguments of ContinuousBatchingRollout, VLLMRollout or VLLMServerRollout, such as "
        "{'servers': ['http://node:8000']}.",
        default=None,
    )
    value_learning_rate: Positive | None = setting(
        "Learning rate of the value head, or of value_model. None: learning_rate.", default=None
    )
    lr_warmup_steps: CountFromZero = setting(
        "PPO steps over which the policy's learning rate rises linearly to learning_rate. The value function uses its "
        "full rate from the first step.",
        default=0,
    )
    kl_gain: NotNegative = setting(
        "Multiply the adaptive coefficient by exp(kl_gain * error) with the error KL / target - 1 of the last step, "
        "clipped to +-1, so that it answers at once and does not overshoot. Take a longer horizon with it. 0: do not.",
        default=0,
    )
    max_kl_coef: Positive | None = setting(
        "Largest KL coefficient of the adaptive controller, so that it does not wind up while no penalty can lower the "
        "KL. None: no bound.",
        default=None,
    )

    importance_sampling_cap: Positive | None = setting(
        "Weigh the policy loss of each token by pi / pi_sampler, at most this, where sampler and trainer differ: "
        "truncated importance sampling, 2 in its paper. None: no weights.",
        default=None,
    )
    asynchronous_rollouts: bool = setting(
        "`train` samples the next batch while this one is learnt from, one step off-policy (arXiv:2410.18252). The "
        "ratio is then to the policy that sampled; with importance_sampling_cap, which weighs that ratio, to the "
        "policy at the start of the step (decoupled, arXiv:2110.00641). For rollout_backend='vllm_server'.",
        default=False,
    )

    gradient_checkpointing: bool = setting("Recompute activations in the backward pass.", default=False)
    dataset_num_proc: Count | None = setting("Processes that tokenize the prompts.", default=None)

    log_table_every: Count = setting("Steps between two tables of texts that `log_stats` sends.", default=10)
    on_save_error: OnSaveError = setting(ON_SAVE_ERROR, default="raise")
    reward_timeout: NotNegative | None = setting(REWARD_TIMEOUT, default=600)
    model_init_kwargs: dict[str, Any] = setting(
        "Arguments of from_pretrained, for a model given by name.", default_factory=dict
    )

    @property
    def clips_to_sampler(self) -> bool:
        """Whether the ratio compares with the sampling policy, by the sampler's own log-probabilities."""
        return self.asynchronous_rollouts and self.importance_sampling_cap is None

    @property
    def kl_target(self) -> float | None:
        """The target of the KL coefficient, in nats per response; None for a constant coefficient."""
        return self.target if self.adap_kl_ctrl else None

    def kl_controller(self) -> FixedKLController:
        """The controller of the KL penalty's coefficient."""
        return kl_controller(
            self.init_kl_coef,
            target=self.kl_target,
            horizon=self.horizon,
            max_kl_coef=self.max_kl_coef,
            gain=self.kl_gain,
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields by name; entries of a dict get names such as "tracker_kwargs/group"."""
        return flattened(vars(self))

    def taken(self, **facts: Any) -> "PPOConfig":
        """A checked copy for a trainer, with the fields that are known at run time. Its fields cannot be assigned."""
        config = replace(self, **facts)
        config._is_taken = True
        return config

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_is_taken", False):
            raise FrozenInstanceError(
                f"A trainer has taken this PPOConfig: {name} cannot be assigned any more. Assign it before the trainer "
                f"is constructed, or construct a trainer with dataclasses.replace(config, {name}=...)."
            )
        super().__setattr__(name, value)

    def __post_init__(self) -> None:
        self._take_deprecated("forward_batch_size", "mini_batch_size")
        self._take_deprecated("optimize_cuda_cache", "optimize_device_cache")
        check_tracker_name(self.log_with)
        check_ranges(self)
        self._check_relations()
        self._compute("backward_batch_size", self.mini_batch_size * self.gradient_accumulation_steps)
        if self.batch_size % self.backward_batch_size:  # type: ignore[operator]
            raise ValueError(
                f"batch_size={self.batch_size} does not split into optimizer steps of mini_batch_size "
                f"{self.mini_batch_size} x gradient_accumulation_steps {self.gradient_accumulation_steps} = "
                f"{self.backward_batch_size} responses; a short last one would weigh its samples more. "
                "Choose sizes whose product divides batch_size."
            )
        epochs = math.ceil(self.steps / self.batch_size)
        if self.total_ppo_epochs not in (None, epochs) and not isinstance(self.total_ppo_epochs, _Computed):
            warnings.warn(
                f"PPOConfig(total_ppo_epochs={self.total_ppo_epochs}) has no effect: it is steps / batch_size = "
                f"{epochs}. Set steps.",
                FutureWarning,
                stacklevel=3,
            )
        self.total_ppo_epochs = _Computed(epochs)
        if self.world_size is not None:
            self._compute("global_backward_batch_size", self.backward_batch_size * self.world_size)  # type: ignore[operator]
            self._compute("global_batch_size", self.batch_size * self.world_size)

    def _take_deprecated(self, old: str, new: str) -> None:
        value = getattr(self, old)
        if value is not None:
            warnings.warn(f"PPOConfig({old}=...) is now {new}=...", FutureWarning, stacklevel=4)
            setattr(self, new, value)
            setattr(self, old, None)

    def _compute(self, name: str, value: int) -> None:
        assigned = getattr(self, name)
        if assigned not in (None, value) and not isinstance(assigned, _Computed):
            raise ValueError(
                f"{name}={assigned} contradicts the other sizes, which make {value}. Leave it out: it is computed."
            )
        setattr(self, name, _Computed(value))

    def _check_relations(self) -> None:
        if self.kl_penalty not in (*SAMPLED_KL, "full"):
            raise ValueError(f"kl_penalty={self.kl_penalty!r} is none of {', '.join([*SAMPLED_KL, 'full'])}.")
        if self.adap_kl_ctrl and (self.target is None or self.horizon is None):
            raise ValueError(
                f"adap_kl_ctrl needs target and horizon, got target={self.target}, horizon={self.horizon}. "
                "Give both, or set adap_kl_ctrl=False for a fixed coefficient."
            )
        if (self.max_kl_coef is not None or self.kl_gain) and not self.adap_kl_ctrl:
            raise ValueError(
                f"max_kl_coef={self.max_kl_coef} and kl_gain={self.kl_gain} belong to the adaptive controller, and "
                "adap_kl_ctrl=False keeps the coefficient. Set adap_kl_ctrl=True, or leave them out."
            )
        if self.max_kl_coef is not None and self.init_kl_coef > self.max_kl_coef:
            raise ValueError(
                f"init_kl_coef={self.init_kl_coef} is above max_kl_coef={self.max_kl_coef}, the largest coefficient. "
                "Lower it, or raise max_kl_coef."
            )
        if self.use_score_norm and not self.use_score_scaling:
            raise ValueError("use_score_norm subtracts the mean before scaling: set use_score_scaling=True as well.")
        if self.push_to_hub_if_best_kwargs and "repo_id" not in self.push_to_hub_if_best_kwargs:
            raise ValueError("push_to_hub_if_best_kwargs needs a repo_id to push to.")
        if "gradient_accumulation_steps" in self.accelerator_kwargs:
            raise ValueError(
                "accelerator_kwargs with gradient_accumulation_steps would divide the loss a second time. "
                "Set PPOConfig(gradient_accumulation_steps=...) instead."
            )
        if self.rollout_backend not in BACKENDS:
            raise ValueError(f"rollout_backend={self.rollout_backend!r} is none of {', '.join(BACKENDS)}.")
        if self.rollout_backend_kwargs and self.rollout_backend == "transformers":
            raise ValueError(
                "rollout_backend_kwargs needs a rollout_backend other than transformers, whose settings "
                "are the arguments of generate and the generation_kwargs of train."
            )
        if self.save_steps and not self.output_dir:
            raise ValueError(f"save_steps={self.save_steps} needs an output_dir to save into.")
