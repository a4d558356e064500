"""Configuration of fine-tuning in steps."""

from dataclasses import dataclass

from trimtab_common.config import setting
from trimtab_lm.data.truncation import check_limit
from trimtab_lm.hf.config import TrainerConfig
from trimtab_lm.legacy.arguments import takes_arguments_of_2024


@dataclass
@takes_arguments_of_2024()
class IterativeSFTConfig(TrainerConfig):
    """Fine-tuning in steps: transformers' TrainingArguments, and settings for the rows of a step.

    The batch size and the accumulation say how the rows of one `step` call are split; max_steps how long the learning
    rate's schedule is.
    """

    max_length: int | None = setting("Tokens of a row; longer ones are cut. None: no limit.", default=None)
    truncation_mode: str = setting("Which part of too long a row stays: keep_end or keep_start.", default="keep_end")
    optimize_device_cache: bool = setting(
        "Give unused accelerator memory back after each step: leaner beside other programs, slightly slower.",
        default=False,
    )
    logging_steps: float = setting("Log every so many optimizer steps; below 1, this part of max_steps.", default=10)
    # The documented defaults, where transformers 5 has others.
    bf16: bool | None = setting("Mixed precision in bfloat16.", default=None)  # type: ignore[assignment]
    optim: str = setting("The optimizer; see transformers.TrainingArguments.", default="adamw_torch")
    report_to: None | str | list[str] = setting(  # noqa: RUF036  HfArgumentParser takes None in the first place alone
        "Trackers: wandb, tensorboard, all, ...; None or none: none.", default=None
    )
    fsdp: str | None = setting("FSDP sharding options; see transformers.TrainingArguments. Empty: no FSDP.", default="")
    gradient_checkpointing: bool | None = setting("Recompute activations in backward, to save memory.", default=False)
    include_num_input_tokens_seen: str | bool = setting("Count tokens: all, non_padding, or no.", default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limit(self.truncation_mode, max_length=self.max_length)
