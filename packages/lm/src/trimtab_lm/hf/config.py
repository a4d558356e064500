"""Shared settings of the trainers on `transformers.Trainer`."""

import copy
import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import TypeVar

import torch
from transformers import TrainingArguments
from transformers.integrations import INTEGRATION_TO_CALLBACK

from trimtab_common.config import Count, NotNegative, check_ranges, setting, without_secrets
from trimtab_common.sealing import ON_SAVE_ERROR, OnSaveError
from trimtab_common.tracking import require_package
from trimtab_lm.data.sources import is_stream

# transformers 5.23 renamed gradient_checkpointing, in arguments and in methods. This is the name that Trainer reads.
_FIELDS = TrainingArguments.__dataclass_fields__
CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in _FIELDS else "gradient_checkpointing"

OF_LAYERS = ("every_n_layers", "offload")
"""Entries of the arguments of checkpointing that `torch.utils.checkpoint` does not take."""

INHERITED = {
    "num_train_epochs": NotNegative,
    "learning_rate": NotNegative,
    "weight_decay": NotNegative,
    "max_grad_norm": NotNegative | None,
    "per_device_train_batch_size": Count,
    "per_device_eval_batch_size": Count,
    "gradient_accumulation_steps": Count,
}
"""The ranges of settings of TrainingArguments, which transformers would notice late or never."""

SHARE_PROMPTS = (
    "Whether one copy of a prompt serves all its answers in a model's rows. None: as many answers as make the least "
    "work, by their lengths."
)
"""The help text of the setting `share_prompts`."""


@dataclass
class TrainerConfig(TrainingArguments):
    """transformers' TrainingArguments, and what every trainer of `TrainerAdapter` adds to them."""

    resume_with_changes: bool = setting(
        "Resume although settings, data or model differ from the checkpoint's, with a warning that lists them; else an "
        "error.",
        default=False,
        kw_only=True,
    )
    model_init_kwargs: dict[str, object] | None = setting(
        "Arguments of from_pretrained, for a model given by name.", default=None, kw_only=True
    )
    on_save_error: OnSaveError = setting(ON_SAVE_ERROR, default="raise", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, INHERITED)
        for tracker in self.report_to or ():
            if tracker in INTEGRATION_TO_CALLBACK:  # else transformers names those that it has
                require_package(tracker, "report_to")

    def to_dict(self) -> dict[str, object]:
        """The fields as plain values, as trackers get them; see transformers. Secrets inside dicts are left out."""
        return {name: without_secrets(value) for name, value in super().to_dict().items()}

    def refuse_label_smoothing(self, trainer: str) -> None:
        """Refuse transformers' label smoothing if the loss has no token labels.

        Raises:
            ValueError: label_smoothing_factor is set.
        """
        if self.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor={self.label_smoothing_factor} smooths token labels, which the loss of "
                f"{trainer} does not have. Set it to 0."
            )

    def refuse_inputs_for_metrics(self, trainer: str, items: str) -> None:
        """Refuse the inputs of an evaluation for compute_metrics if their rows are not those of its predictions.

        Raises:
            ValueError: include_for_metrics names the inputs.
        """
        if "inputs" in self.include_for_metrics:
            raise ValueError(
                f"include_for_metrics=['inputs'] is not possible: several {items} share a row of the inputs of "
                f"{trainer}. Take what compute_metrics needs from the data set, whose order evaluation keeps."
            )


Config = TypeVar("Config", bound=TrainerConfig)


def checkpointing_of(args: TrainingArguments) -> tuple[bool, dict[str, object] | None]:
    """Whether the model recomputes activations in backward, and its arguments of `torch.utils.checkpoint`."""
    kwargs = getattr(args, f"{CHECKPOINTING}_kwargs") or {}
    rest = {name: value for name, value in kwargs.items() if name not in OF_LAYERS}
    return bool(getattr(args, CHECKPOINTING)), rest or None


def checkpointed_layers(args: TrainingArguments) -> dict[str, object]:
    """The arguments that choose the layers to recompute, and where their activations lie."""
    kwargs = getattr(args, f"{CHECKPOINTING}_kwargs") or {}
    return {name: kwargs[name] for name in OF_LAYERS if name in kwargs}


def for_own_collators(config: Config, train_dataset: object, eval_dataset: object) -> Config:
    """A copy of the config for a trainer whose collator makes the model's inputs; does not change the caller's.

    Trainer does not drop columns by the names of the model's inputs. Each process reads its own rows of a stream,
    because batches of different shapes cannot be sent to other processes.

    Args:
        eval_dataset: the trainer's evaluation set, or a dict of several.
    """
    config = copy.copy(config)
    config.remove_unused_columns = False
    config.enable_jit_checkpoint = False  # AdapterCallback saves in its place
    config.logging_nan_inf_filter = False  # training_step raises first; the filter would wait for the device twice
    evaluated = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
    if any(map(is_stream, [train_dataset, *evaluated])):
        config.accelerator_config = copy.copy(config.accelerator_config)
        config.accelerator_config.dispatch_batches = False  # type: ignore[union-attr]
    if config.use_liger_kernel and runs_liger(config.device):
        # Liger's loss would replace the model's forward, where our trainers score tokens.
        off = {"fused_linear_cross_entropy": False, "cross_entropy": False}
        config.liger_kernel_config = off | (config.liger_kernel_config or {})
    else:
        config.use_liger_kernel = False
    return config


def runs_liger(device: torch.device) -> bool:
    """Whether Liger's Triton kernels can be imported and run on the device; warns with the reason if not."""
    try:
        if device.type == "cpu":
            raise ImportError("its kernels need a GPU")
        import_module("liger_kernel.transformers")
    except ImportError as missing:
        warnings.warn(f"The model trains without use_liger_kernel: {missing}.", stacklevel=6)
        return False
    return True
