"""Configuration of KTO."""

from dataclasses import dataclass

from trimtab_common.config import Count, Positive, setting
from trimtab_lm.data.truncation import check_limits
from trimtab_lm.hf.config import TrainerConfig
from trimtab_lm.legacy.arguments import takes_arguments_of_2024
from trimtab_lm.legacy.translations import KTO_ARGUMENTS

from .loss import LOSSES, WITHOUT_KL


@dataclass
@takes_arguments_of_2024(KTO_ARGUMENTS)
class KTOConfig(TrainerConfig):
    """KTO, learning from desirable and undesirable answers (Ethayarajh et al. 2024, arXiv:2402.01306).

    All settings of `transformers.TrainingArguments`, and the following. Lengths are in tokens.
    """

    beta: Positive = setting(
        "How strongly the policy is held to the reference: rewards are beta x (log pi - log ref).", default=0.1
    )
    loss_type: str = setting(
        "kto, or apo_zero_unpaired, which has no estimate of the KL and takes 0 in its place.", default="kto"
    )
    desirable_weight: Positive = setting(
        "Weight of the losses of desirable answers. With d desirable and u undesirable rows, the paper takes weights "
        "whose (desirable_weight x d) / (undesirable_weight x u) lies between 1 and 4/3.",
        default=1.0,
    )
    undesirable_weight: Positive = setting("Weight of the losses of undesirable answers.", default=1.0)
    disable_dropout: bool = setting("Train without dropout. The reference has none in any case.", default=True)

    max_length: int | None = setting(
        "Prompt and completion together; of an encoder-decoder model each of them. What is longer is cut: the prompt "
        "first, though not below half of max_length, then the completion. None: no limit.",
        default=None,
    )
    max_prompt_length: Count | None = setting("Prompt, cut before anything else. None: no own limit.", default=None)
    truncation_mode: str = setting(
        "What is kept of a prompt or a completion that is too long: keep_end (and the prompt's BOS) or keep_start (and "
        "the completion's EOS).",
        default="keep_end",
    )
    ref_model_init_kwargs: dict[str, object] | None = setting(
        "Arguments of from_pretrained, if the reference model is given by its name. None: model_init_kwargs.",
        default=None,
    )
    dataset_num_proc: Count | None = setting("Processes that tokenize the data sets.", default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refuse_label_smoothing("KTO")
        self.refuse_inputs_for_metrics("KTO", "answers")
        limits = {"max_length": self.max_length, "max_prompt_length": self.max_prompt_length}
        check_limits(self.truncation_mode, **limits)
        if self.loss_type not in LOSSES:
            raise ValueError(f"loss_type={self.loss_type!r} is unknown. Use one of {', '.join(LOSSES)}.")
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
            self.check_batch_size(getattr(self, name), name)

    def check_batch_size(self, size: int, name: str) -> None:
        """Raises ValueError for batches of one row, unless the loss needs no estimate of the KL."""
        if size == 1 and self.has_kl:
            raise ValueError(
                f"{name}=1: KTO estimates the KL from prompts with the completions of other rows of the batch, and "
                "there are none. Use at least 2 (and fewer gradient_accumulation_steps), or "
                "loss_type='apo_zero_unpaired', which needs no estimate."
            )

    @property
    def has_kl(self) -> bool:
        """Whether the loss reads an estimate of the KL, so that mismatched answers are scored."""
        return self.loss_type not in WITHOUT_KL
