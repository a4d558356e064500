"""Configuration of DPO and its relatives."""

import copy
from dataclasses import dataclass
from pathlib import Path

from trimtab_common.config import Count, CountFromZero, NotNegative, check_ranges, setting
from trimtab_lm.data.truncation import check_limits
from trimtab_lm.hf.config import SHARE_PROMPTS, TrainerConfig
from trimtab_lm.legacy.arguments import takes_arguments_of_2024
from trimtab_lm.legacy.translations import DPO_ARGUMENTS

from .loss import LOSSES, check_losses, needs_reference


@dataclass
@takes_arguments_of_2024(DPO_ARGUMENTS)
class DPOConfig(TrainerConfig):
    """Learning from preferences without a reward model (Rafailov et al. 2023, arXiv:2305.18290).

    All settings of `transformers.TrainingArguments`, and the following. Lengths are in tokens.
    """

    beta: float = setting(
        "How strongly the policy is held to the reference: rewards are beta x (log pi - log ref). tau of ipo, lambda "
        "of orpo; simpo's paper has 2 to 2.5.",
        default=0.1,
    )
    label_smoothing: float = setting(
        "Share of preferences that are wrong, from 0 to 0.5: conservative DPO, robust, exo_pair, aot, aot_pair, cpo, "
        "simpo.",
        default=0.0,
    )
    loss_type: str | list[str] = setting(
        "sigmoid, hinge, ipo, kto_pair (or kto), robust, exo_pair, nca_pair, apo_zero, apo_down, sppo_hard, aot, "
        "aot_pair, discopop, sft (of the chosen answer); cpo, simpo, orpo, which have no reference; or several, whose "
        "weighted sum is the loss. A subclass of DPOTrainer with its own dpo_loss takes any name.",
        default="sigmoid",
    )
    loss_weights: list[float] | None = setting("Weights of the losses, of any sum. None: 1 each.", default=None)
    simpo_gamma: NotNegative | None = setting(
        "The margin that simpo asks for, in the unit of its rewards, beta x log pi per token. None: 0.5.", default=None
    )
    reference_free: bool = setting(
        "Measure against a reference that gives all answers the same probability; no reference model. True where "
        "loss_type needs none.",
        default=False,
    )
    share_prompts: bool | None = setting(SHARE_PROMPTS, default=None)
    disable_dropout: bool = setting("Train without dropout. The reference has none in any case.", default=True)

    max_length: int | None = setting(
        "Prompt and answer together; of an encoder-decoder model each of them. What is longer is cut: the prompt "
        "first, though not below half of max_length, then the answers. None: no limit.",
        default=None,
    )
    max_prompt_length: Count | None = setting("Prompt, cut before anything else. None: no own limit.", default=None)
    max_target_length: Count | None = setting("Answers. None: no limit of their own.", default=None)
    truncation_mode: str = setting(
        "What is kept of a prompt or an answer that is too long: keep_end (and the prompt's BOS) or keep_start (and "
        "the answer's EOS).",
        default="keep_end",
    )
    label_pad_token_id: int = setting("Marks, in the labels, what does not count. Negative.", default=-100)
    padding_value: CountFromZero | None = setting(
        "Padding token. None: the tokenizer's pad token, or EOS.", default=None
    )
    is_encoder_decoder: bool | None = setting(
        "Optional check: an error if the model is of the other kind.", default=None
    )
    dataset_num_proc: Count | None = setting("Processes that tokenize the data sets.", default=None)

    precompute_ref_log_probs: bool = setting(
        "Take the reference's log-probabilities once, when the trainer is made, for the training set and all "
        "evaluation sets, and keep no copy of the model as the reference.",
        default=False,
    )
    ref_log_probs_cache: str | None = setting(
        "Folder of precomputed log-probabilities, found again by the content of reference and data set. None: "
        "output_dir/_ref_log_probs.",
        default=None,
    )
    ref_model_init_kwargs: dict[str, object] | None = setting(
        "Arguments of from_pretrained, if the reference model is given by its name.", default=None
    )
    model_adapter_name: str | None = setting(
        "PEFT adapter that trains, of a model that has several. None: the one that is active.", default=None
    )
    ref_adapter_name: str | None = setting(
        "PEFT adapter that makes the model its own reference. None: the model without adapters.", default=None
    )

    generate_during_eval: bool = setting(
        "At each evaluation sample answers of policy and reference to some prompts, into a table of the trackers.",
        default=False,
    )
    num_eval_samples: Count = setting("Prompts of that table.", default=8)
    max_new_tokens: Count = setting("Longest answer in that table; less if the model has fewer positions.", default=128)
    generation_kwargs: dict[str, object] | None = setting(
        "Settings of generation for that table, such as temperature. None: samples of the model's own distribution.",
        default=None,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.loss_type, list) and len(self.loss_type) == 1 and self.loss_weights is None:
            self.loss_type = self.loss_type[0]
        self.loss_type = self.loss_type or "sigmoid"
        self.refuse_label_smoothing("DPO")
        self.refuse_inputs_for_metrics("DPO", "pairs")
        self._check_settings()
        # A config that is made of another's values has its reference_free, which may follow from the loss.
        self._asks_reference_free = self.reference_free and needs_reference(self.loss_type)
        self.reference_free = self._asks_reference_free or not needs_reference(self.loss_type)
        names = ("precompute_ref_log_probs", "ref_adapter_name", "ref_model_init_kwargs")
        given = [name for name in names if getattr(self, name)]
        if self.reference_free and given:
            raise ValueError(
                f"loss_type={self.loss_type!r} with reference_free=True has no reference, so {', '.join(given)} mean "
                "nothing. Choose one."
            )
        if self.ref_adapter_name is not None and self.ref_adapter_name == self.model_adapter_name:
            raise ValueError(
                f"model_adapter_name and ref_adapter_name are both {self.ref_adapter_name!r}: the reference would move "
                "with the policy. Load its adapter a second time, under another name."
            )
        if self.ref_log_probs_cache is not None and not self.precompute_ref_log_probs:
            raise ValueError("ref_log_probs_cache is where precomputed numbers lie: set precompute_ref_log_probs=True.")
        if self.generation_kwargs and not self.generate_during_eval:
            raise ValueError("generation_kwargs are for the table of samples: set generate_during_eval=True.")

    @property
    def has_own_loss(self) -> bool:
        """Whether loss_type is a name that only a replaced method of DPOTrainer can know."""
        return isinstance(self.loss_type, str) and self.loss_type not in LOSSES

    @property
    def cache_folder(self) -> Path:
        """Folder of precomputed log-probabilities; not pushed to the hub."""
        return Path(self.ref_log_probs_cache or Path(str(self.output_dir)) / "_ref_log_probs")

    def with_setting(self, name: str, value: object) -> "DPOConfig":
        """A checked copy with another value for a setting of the losses or of the tokenization."""
        changed = copy.copy(self)
        setattr(changed, name, value)
        check_ranges(changed)
        changed._check_settings()
        if name == "reference_free":
            changed._asks_reference_free = bool(value)
        changed.reference_free = changed._asks_reference_free or not needs_reference(changed.loss_type)
        return changed

    def _check_settings(self) -> None:
        if not self.has_own_loss:
            numbers = {"beta": self.beta, "label_smoothing": self.label_smoothing}
            check_losses(self.loss_type, self.loss_weights, **numbers)
        if self.simpo_gamma is not None and "simpo" not in self.loss_type:
            raise ValueError(f"simpo_gamma={self.simpo_gamma} is of loss_type='simpo', not {self.loss_type!r}.")
        limits = {"max_length": self.max_length, "max_prompt_length": self.max_prompt_length}
        check_limits(self.truncation_mode, **limits)
        if self.label_pad_token_id >= 0:
            raise ValueError(
                f"label_pad_token_id={self.label_pad_token_id} can be the id of a token, such as EOS, which would then "
                "not count where it stands in an answer. Use a negative number; the default is -100."
            )
