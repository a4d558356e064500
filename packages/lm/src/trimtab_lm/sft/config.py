"""Configuration of supervised fine-tuning."""

from dataclasses import dataclass
from typing import Any

from trimtab_common.config import setting
from trimtab_lm.data.truncation import check_limit
from trimtab_lm.hf.config import TrainerConfig
from trimtab_lm.legacy.arguments import takes_arguments_of_2024
from trimtab_lm.legacy.translations import SFT_ARGUMENTS

DATASET_KWARGS = {"skip_prepare_dataset", "add_special_tokens", "append_concat_token"}


@dataclass
@takes_arguments_of_2024(SFT_ARGUMENTS)
class SFTConfig(TrainerConfig):
    """Supervised fine-tuning: all of transformers' TrainingArguments, and how rows become tokens."""

    max_length: int | None = setting("Longest row in tokens; longer ones are truncated. None: no limit.", default=512)
    truncation_mode: str = setting("Which part of too long a row stays: keep_start or keep_end.", default="keep_start")
    dataset_text_field: str = setting("Column of the texts, in data sets of texts.", default="text")
    completion_only_loss: bool | None = setting(
        "Learn the completion of prompt/completion rows alone. None: yes where there are such columns.", default=None
    )
    assistant_only_loss: bool = setting("Learn the assistant's turns of a conversation alone.", default=False)
    packing: bool = setting("Fill rows of max_length with documents, which do not see each other.", default=False)
    packing_strategy: str | None = setting(
        "best_fit: whole documents, in as few rows as they fit into. constant_length: documents one after the other, "
        "cut where a row is full. None: best_fit, unless one of the settings of constant_length is given.",
        default=None,
    )
    eval_packing: bool | None = setting(
        "The same for evaluation, unless compute_metrics reads its rows. None: as packing.", default=None
    )
    infinite: bool | None = setting(
        "constant_length: begin training again at the data's end (needs max_steps).", default=None
    )
    num_of_sequences: int = setting("constant_length: rows to tokenize at a time.", default=1024)
    chars_per_token: float = setting("constant_length: characters of a token, to guess how many texts.", default=3.6)
    dataset_num_proc: int | None = setting("Processes that tokenize the data.", default=None)
    dataset_batch_size: int | None = setting(
        "Rows to tokenize (and to pack, from a stream) at a time. None or 0: all at once.", default=1000
    )
    dataset_kwargs: dict[str, Any] | None = setting(
        "skip_prepare_dataset: the rows are the collator's business. add_special_tokens: False for texts, or prompts "
        "and completions, that hold them already, EOS included. append_concat_token: False for constant_length "
        "without EOS between texts.",
        default=None,
    )
    chat_template_kwargs: dict[str, object] | None = setting(
        "Arguments of the chat template; a row's own, in a column of this name, come before them.", default=None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limit(self.truncation_mode, max_length=self.max_length)
        self._choose_packing()
        if self.assistant_only_loss and self.completion_only_loss:
            raise ValueError("assistant_only_loss and completion_only_loss are both set. Choose what is learnt.")
        unknown = set(self.dataset_kwargs or {}) - DATASET_KWARGS
        if unknown:
            raise ValueError(f"dataset_kwargs has {sorted(unknown)}; known are {sorted(DATASET_KWARGS)}.")

    def _choose_packing(self) -> None:
        asked = self.infinite or self.num_of_sequences != 1024 or self.chars_per_token != 3.6
        if self.packing_strategy is None:
            self.packing_strategy = "constant_length" if asked else "best_fit"
        if self.packing_strategy not in ("best_fit", "constant_length"):
            raise ValueError(
                f"packing_strategy={self.packing_strategy!r} is unknown. Use 'best_fit' or 'constant_length'."
            )
        if asked and not (self.packing and self.packing_strategy == "constant_length"):
            raise ValueError(
                "infinite, num_of_sequences and chars_per_token belong to packing=True with "
                f"packing_strategy='constant_length'; packing={self.packing}, {self.packing_strategy!r} came in."
            )
        if self.eval_packing is None:
            self.eval_packing = self.packing
        if (self.packing or self.eval_packing) and self.max_length is None:
            name = "packing" if self.packing else "eval_packing"
            raise ValueError(f"{name} fills rows of max_length tokens, which is None. Set it.")
        if self.infinite and self.max_steps <= 0:
            raise ValueError(f"infinite=True never ends by itself and max_steps={self.max_steps}. Set max_steps.")
