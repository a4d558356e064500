"""Configuration of GRPO."""

from dataclasses import dataclass
from typing import Any, Literal

from trimtab_common.config import Count, NotNegative, Positive, setting
from trimtab_common.time_limit import REWARD_TIMEOUT
from trimtab_lm.hf.config import SHARE_PROMPTS, TrainerConfig
from trimtab_lm.legacy.arguments import takes_arguments_of_2024
from trimtab_lm.legacy.translations import GRPO_ARGUMENTS
from trimtab_lm.sampling.backends import BACKENDS
from trimtab_lm.sampling.rollout import SamplingSettings

from .loss import LOG_RATIOS, NORMALIZATIONS, SCALES


@dataclass
@takes_arguments_of_2024(GRPO_ARGUMENTS)
class GRPOConfig(TrainerConfig):
    """GRPO (Shao et al. 2024, arXiv:2402.03300) and its relatives: all of transformers' TrainingArguments, and more.

    per_device_train_batch_size counts prompts, each with num_generations completions, so that a group never leaves its
    process. One call of generation takes per_device_train_batch_size x gradient_accumulation_steps x
    steps_per_generation prompts on each process. With group_parts, per_device_train_batch_size counts parts of groups,
    and the prompts are fewer in proportion.
    """

    learning_rate: float = setting("Peak learning rate of the optimizer.", default=1e-6)
    logging_steps: float = setting("Optimizer steps between logs; below 1, a share of all steps.", default=10)
    remove_unused_columns: bool = setting("Always False in effect: reward functions read the columns.", default=False)

    num_generations: int = setting("Completions of each prompt, which are compared with one another.", default=8)
    group_parts: Count = setting(
        "Parts into which the completions of a prompt are divided for the updates, so that a micro-batch may hold less "
        "than a group. The loss and its gradient stay the same.",
        default=1,
    )
    max_completion_length: Count = setting("Tokens of a completion at most.", default=256)
    max_prompt_length: Count | None = setting(
        "Longest prompt, in tokens. Longer prompts lose their beginning, with a warning. None: no limit.", default=None
    )
    shuffle_dataset: bool = setting("Take the prompts in a new order in every epoch.", default=True)
    steps_per_generation: Count = setting("Optimizer steps that one call of generation provides for.", default=1)
    num_iterations: Count = setting("Passes over each rollout, the mu of Algorithm 1.", default=1)

    temperature: float = setting("Divides the logits, in sampling and in log-probabilities alike.", default=1.0)
    top_p: float = setting("Sample from the likeliest tokens of this total probability. 1: from all.", default=1.0)
    top_k: int = setting("Sample from so many of the likeliest tokens. 0: from all.", default=0)
    min_p: float | None = setting("Never sample tokens less likely than this times the likeliest.", default=None)
    repetition_penalty: float = setting("Divides the logits of tokens that were seen. 1: off.", default=1.0)
    generation_kwargs: dict[str, object] | None = setting(
        "Further settings in the sampler's own terms: those of GenerationConfig or vllm.SamplingParams.", default=None
    )
    rollout_backend: str = setting(
        "What samples: transformers (generate), continuous_batching (transformers' own engine), vllm (its engine in "
        "this process) or vllm_server.",
        default="transformers",
    )
    use_vllm: bool = setting("The same as rollout_backend='vllm'.", default=False)
    rollout_backend_kwargs: dict[str, object] | None = setting(
        "Settings of the sampler: arguments of TransformersRollout, ContinuousBatchingRollout, VLLMRollout or "
        "VLLMServerRollout, such as {'servers': ['http://node:8000']}.",
        default=None,
    )

    beta: NotNegative = setting("Weight of the KL to the reference. At 0 there is no reference in memory.", default=0.0)
    use_bias_correction_kl: bool = setting(
        "Multiply the KL estimate k3 by the ratio: its gradient is then the KL's own (arXiv:2512.02556, Eq. 7). "
        "False is the penalty of the GRPO paper.",
        default=True,
    )
    epsilon: Positive = setting("The ratio is clipped below 1 - epsilon, and above 1 + epsilon_high.", default=0.2)
    epsilon_high: Positive | None = setting("None: as epsilon. DAPO takes 0.28.", default=None)
    delta: float | None = setting("Bounds the ratio of negative advantages, above 1 + epsilon_high.", default=None)
    importance_sampling_level: str = setting("token, or sequence: one ratio per completion (GSPO).", default="token")
    importance_sampling_cap: Positive | None = setting(
        "Weigh the loss of each token by pi / pi_sampler, at most this, where sampler and trainer differ: truncated "
        "importance sampling, 2 in its paper. None: no weights.",
        default=None,
    )
    asynchronous_rollouts: bool = setting(
        "Sample the next rollout while this one is trained on, one step off-policy (arXiv:2410.18252). The ratio is "
        "then to the policy that sampled; with importance_sampling_cap, which weighs that ratio, to the policy at the "
        "start of the update (decoupled, arXiv:2110.00641). For rollout_backend='vllm_server'.",
        default=False,
    )
    loss_type: str = setting(
        "What a token weighs. dapo: the same over the whole step. grpo: the same within its completion, and each "
        "completion the same. bnpo: the same within its process. dr_grpo: 1 / max_completion_length. cispo: as dapo, "
        "with the ratio, at most 1 + epsilon_high, as a weight of its log-probability that has no gradient.",
        default="dapo",
    )
    # Not bool | str: transformers' parser would make of that a bool.
    scale_rewards: Literal["group", "batch", "none", "rloo", "reinforce++", "raw", True, False] = setting(
        "Rewards less their group's mean, over the deviation of the group, or of the whole batch of all processes, or "
        "undivided (none: Dr. GRPO). rloo: less the mean of the group's others. reinforce++: less the mean of the "
        "whole batch, over its deviation. raw: rewards as they are (REINFORCE). True is group, False is none.",
        default="group",
    )
    reward_weights: list[float] | None = setting("Weights of the rewards, the environment last.", default=None)
    reward_names: list[str] | None = setting("Names of the reward functions in logs. None: their own.", default=None)
    mask_truncated_completions: bool = setting("Leave unended completions out of loss and baseline.", default=False)
    share_prompts: bool | None = setting(SHARE_PROMPTS, default=None)
    disable_dropout: bool = setting("Train without dropout, as completions are sampled.", default=True)

    chat_template_kwargs: dict[str, object] | None = setting("Arguments of the chat template.", default=None)
    dataset_num_proc: Count | None = setting("Processes that tokenize the prompts.", default=None)
    log_completions: bool = setting("Print some completions at every log.", default=False)
    num_completions_to_print: int | None = setting("How many of them. None: all of the last rollout.", default=None)
    reward_timeout: NotNegative | None = setting(REWARD_TIMEOUT, default=600)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.scale_rewards, bool):
            self.scale_rewards = "group" if self.scale_rewards else "none"
        if self.use_vllm and self.rollout_backend == "transformers":
            self.rollout_backend = "vllm"
        self.sampling()
        self._check_choices()
        self._check_numbers()

    def sampling(self) -> SamplingSettings:
        """How completions are sampled."""
        names = SamplingSettings.__dataclass_fields__.keys() - {"generation_kwargs"}
        values = {name: getattr(self, name) for name in names}
        return SamplingSettings(**values, generation_kwargs=self.generation_kwargs or {})

    @property
    def clip(self) -> dict[str, Any]:
        """The bounds of the ratio for `clipped_surrogate` (DAPO, Yu et al. 2025, arXiv:2503.14476, Eq. 10).

        `cispo_losses` have no lower bound.
        """
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        low = 1.0 if self.loss_type == "cispo" else self.epsilon
        return {"clip_low": low, "clip_high": high, "dual_clip": self.delta}

    @property
    def clips_to_sampler(self) -> bool:
        """Whether the ratio compares with the sampling policy, by the sampler's own log-probabilities."""
        return self.asynchronous_rollouts and self.importance_sampling_cap is None

    @property
    def samples_tell_surprise(self) -> bool:
        """Whether the loss covers all tokens that the policy sampled, before it moved."""
        return not (self.asynchronous_rollouts or self.mask_truncated_completions)

    def _check_choices(self) -> None:
        for name, choices in (
            ("rollout_backend", BACKENDS),
            ("loss_type", NORMALIZATIONS),
            ("importance_sampling_level", LOG_RATIOS),
            ("scale_rewards", SCALES),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown. Use one of {', '.join(choices)}.")
        if self.use_vllm and self.rollout_backend not in ("vllm", "vllm_server"):
            raise ValueError(f"use_vllm=True and rollout_backend={self.rollout_backend!r}: leave one of them out.")
        if self.train_sampling_strategy not in ("random", "sequential"):
            raise ValueError(
                f"train_sampling_strategy={self.train_sampling_strategy!r} orders rows by length, but here rows are "
                "prompts whose completions are yet to come. Use 'random' or 'sequential'."
            )
        if self.neftune_noise_alpha is not None and self.disable_dropout:
            raise ValueError(
                f"neftune_noise_alpha={self.neftune_noise_alpha} adds noise in training, and disable_dropout asks for "
                "the log-probabilities of sampling. Set disable_dropout=False, or leave neftune_noise_alpha out."
            )
        self.refuse_label_smoothing("GRPO")

    def _check_numbers(self) -> None:
        if self.num_generations < 2:
            raise ValueError(
                f"num_generations={self.num_generations}: a completion is measured against the others of its prompt, "
                "so that there must be 2 or more."
            )
        parts, in_step = self.group_parts, self.per_device_train_batch_size * self.gradient_accumulation_steps
        if self.num_generations % parts or in_step % parts:
            raise ValueError(
                f"group_parts={parts} must divide num_generations={self.num_generations}, and {in_step}, the product "
                "of per_device_train_batch_size and gradient_accumulation_steps: an optimizer step has whole groups."
            )
        high = self.clip["clip_high"]
        if self.delta is not None and self.loss_type == "cispo":
            raise ValueError(f"delta={self.delta} has no meaning for cispo, which bounds all ratios. Leave it out.")
        if self.delta is not None and self.delta <= 1 + high:
            raise ValueError(
                f"delta={self.delta} is not above 1 + epsilon_high = {1 + high:g}, where it would cut what the clip "
                "leaves. Raise it, or leave it out."
            )
