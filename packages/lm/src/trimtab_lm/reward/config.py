"""Configuration of reward-model training."""

from dataclasses import dataclass
from typing import Literal, get_args

from trimtab_common.config import CountFromZero, Positive, setting
from trimtab_lm.data.truncation import check_limits
from trimtab_lm.hf.config import SHARE_PROMPTS, TrainerConfig
from trimtab_lm.legacy.arguments import takes_arguments_of_2024
from trimtab_lm.legacy.translations import REWARD_ARGUMENTS

TruncationMode = Literal["filter", "keep_start", "keep_end"]


@dataclass
@takes_arguments_of_2024(REWARD_ARGUMENTS)
class RewardConfig(TrainerConfig):
    """A reward model from pairs of answers (Christiano et al. 2017; Ouyang et al. 2022, arXiv:2203.02155, Eq. 1).

    All settings of `transformers.TrainingArguments`, with the documented defaults: activation checkpointing is
    on.
    """

    max_length: int | None = setting(
        "Tokens of a prompt with one of its answers, at most; what happens to longer pairs is truncation_mode's. "
        "None: as long as they are.",
        default=None,
    )
    truncation_mode: TruncationMode = setting(
        "What to do with a pair if a text is longer than max_length. filter: drop it. keep_start, keep_end: cut "
        "the prompt first, though not below half of max_length, then each answer, to its start (and its stop token) "
        "or its end; a pair whose answers are then the same is dropped.",
        default="filter",
    )
    center_rewards_coefficient: Positive | None = setting(
        "Weight of (chosen + rejected)^2, which keeps scores around 0 (Eisenstein et al. 2023, arXiv:2312.09244, who "
        "use 0.01). None: pairs leave the level of scores open.",
        default=None,
    )
    init_reward_head: bool = setting(
        "Sample the head's weights from N(0, 1 / (d + 1)), a deviation of 1 / sqrt(d + 1) for d inputs, and set its "
        "bias to 0 (Huang et al. 2024, arXiv:2403.17031, detail 15).",
        default=False,
    )
    share_prompts: bool | None = setting(SHARE_PROMPTS, default=None)
    disable_dropout: bool = setting("Train without dropout.", default=False)
    num_eval_samples: CountFromZero = setting(
        "Pairs, from the first of the main process, in the table of texts and scores that each evaluation gives to "
        "wandb and tensorboard. 0: none.",
        default=16,
    )
    dataset_num_proc: int | None = setting("Processes that tokenize the dataset.", default=None)

    # Documented defaults that are not those of transformers 5.
    gradient_checkpointing: bool | None = setting(
        "Compute activations anew in backward, for less memory (alias of activation_checkpointing). A model that "
        "cannot warns, and trains without.",
        default=True,
    )
    optim: str = setting("The optimizer; see transformers.TrainingArguments.", default="adamw_torch")
    report_to: None | str | list[str] = setting(  # noqa: RUF036  HfArgumentParser takes None in the first place alone
        "Trackers: wandb, tensorboard, all, ...; None or none: none.", default=None
    )
    fsdp: str | None = setting("FSDP sharding options; see transformers.TrainingArguments. Empty: no FSDP.", default="")
    hub_private_repo: bool | None = setting("Make the repository on the hub a private one.", default=False)
    include_num_input_tokens_seen: str | bool = setting("Count tokens: all, non_padding, or no.", default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_label_smoothing("RewardTrainer")
        self.refuse_inputs_for_metrics("RewardTrainer", "answers")
        check_limits(self.truncation_mode, get_args(TruncationMode), max_length=self.max_length)
        labels = (self.model_init_kwargs or {}).get("num_labels", 1)
        if labels != 1:
            raise ValueError(
                f"model_init_kwargs={{'num_labels': {labels}}} came, and a model that is loaded by name gets one "
                "label, which is the score. Leave num_labels out, or pass a model of several labels in memory."
            )
