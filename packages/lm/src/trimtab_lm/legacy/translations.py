"""The arguments of old TRL (0.7 to 0.11) that transformers 5 has dropped, and how each is translated."""

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import IntervalStrategy

Translate: TypeAlias = Callable[[TrainingArguments, str, Any], None]
"""translate(config, name, value): sets the present field of a config from a dropped argument and its value."""


class Argument(NamedTuple):
    """A dropped argument of TrainingArguments.

    Args:
        annotation: its type.
        default: its documented default.
        advice: what to write instead, for the warning.
        translate: sets the field that has replaced it; None where nothing has.
    """

    annotation: object
    default: object
    advice: str
    translate: Translate | None = None


def defaults_of(kind: type[TrainingArguments]) -> dict[str, Any]:
    """Returns the default of each field of a config class."""
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(kind)
    }


def conflict(old: str, new: str, value: object, present: object) -> str:
    """Returns the message about an old and a new spelling with different values. It does not show tokens."""
    shown = "" if "token" in new else f": {value!r} and {present!r}"
    return f"{old} and {new} are both given and differ{shown}. Give {new} alone."


def _set(config: TrainingArguments, old: str, new: str, value: object) -> None:
    """Sets the field `new` to the value of the argument `old`, unless it has a third value."""
    present = getattr(config, new)
    if present not in (defaults_of(type(config))[new], value):
        raise ValueError(conflict(old, new, value, present))
    setattr(config, new, value)


def _renamed(annotation: object, default: object, new: str, constant: object = None) -> Argument:
    """The field `new` has replaced the argument. It takes the value, or for a flag the constant."""

    def translate(config: TrainingArguments, old: str, value: object) -> None:
        _set(config, old, new, value if constant is None else constant)

    advice = f"write {new}" if constant is None else f"write {new}={constant!r}"
    return Argument(annotation, default, advice, translate)


def _entry(annotation: object, default: object, holder: str, key: str, **also: str) -> Argument:
    """The entry `key` of the dict field `holder` has replaced the argument; `also` are entries that it needs."""

    def translate(config: TrainingArguments, old: str, value: object) -> None:
        present = getattr(config, holder)
        if isinstance(present, str):
            raise ValueError(f"{old} cannot be set inside {holder}={present!r}: write {key!r} there and omit {old}.")
        if isinstance(present, AcceleratorConfig):
            unset = AcceleratorConfig().to_dict()
            present = {name: entry for name, entry in present.to_dict().items() if entry != unset[name]}
        entries = {name.removeprefix("fsdp_"): entry for name, entry in (present or {}).items()}
        for name, entry in {key: value, **also}.items():
            if entries.setdefault(name, entry) != entry:
                raise ValueError(conflict(old, f"{holder}[{name!r}]", entry, entries[name]))
        setattr(config, holder, entries)

    entries = ", ".join([f"{key!r}: ...", *(f"{name!r}: {entry!r}" for name, entry in also.items())])
    return Argument(annotation, default, f"write {holder}={{{entries}}}", translate)


def _set_warmup(config: TrainingArguments, old: str, ratio: float) -> None:
    if not 0 <= ratio <= 1:
        raise ValueError(f"warmup_ratio={ratio} is no part of all steps. Use a number from 0 to 1.")
    # warmup_steps=1.0 would mean one step. The next smaller float means all steps.
    _set(config, old, "warmup_steps", min(ratio, math.nextafter(1.0, 0.0)))


def _add_inputs(config: TrainingArguments, old: str, value: bool) -> None:
    config.include_for_metrics = list(dict.fromkeys([*config.include_for_metrics, "inputs"]))


def _count_tokens(config: TrainingArguments, old: str, value: bool) -> None:
    if config.include_num_input_tokens_seen in (False, "no"):  # both ways of counting give the rate
        config.include_num_input_tokens_seen = "all"


def _set_logging_dir(config: TrainingArguments, old: str, folder: object) -> None:
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder)


def _set_repository(config: Any, old: str, value: str) -> None:
    """Joins the two dropped arguments, which are fields of `config` here, into one name."""
    name = config.push_to_hub_model_id or Path(config.output_dir or "trainer_output").name
    owner = config.push_to_hub_organization
    _set(config, old, "hub_model_id", f"{owner}/{name}" if owner else name)


ARGUMENTS: dict[str, Argument] = {
    "evaluation_strategy": _renamed(IntervalStrategy | str, "no", "eval_strategy"),
    "per_gpu_train_batch_size": _renamed(int | None, None, "per_device_train_batch_size"),
    "per_gpu_eval_batch_size": _renamed(int | None, None, "per_device_eval_batch_size"),
    "no_cuda": _renamed(bool, False, "use_cpu"),
    "push_to_hub_token": _renamed(str | None, None, "hub_token"),
    "group_by_length": _renamed(bool, False, "train_sampling_strategy", "group_by_length"),
    "adafactor": _renamed(bool, False, "optim", "adafactor"),
    "fsdp_min_num_params": _entry(int, 0, "fsdp_config", "min_num_params", auto_wrap_policy="SIZE_BASED_WRAP"),
    "fsdp_transformer_layer_cls_to_wrap": _entry(
        str | None, None, "fsdp_config", "transformer_layer_cls_to_wrap", auto_wrap_policy="TRANSFORMER_BASED_WRAP"
    ),
    "dispatch_batches": _entry(bool | None, None, "accelerator_config", "dispatch_batches"),
    "split_batches": _entry(bool | None, False, "accelerator_config", "split_batches"),
    "push_to_hub_model_id": Argument(str | None, None, "write hub_model_id='owner/name'", _set_repository),
    "push_to_hub_organization": Argument(str | None, None, "write hub_model_id='owner/name'", _set_repository),
    "warmup_ratio": Argument(float, 0.0, "write warmup_steps, which below 1 is a ratio", _set_warmup),
    "logging_dir": Argument(
        str | None, None, "set the environment variable TENSORBOARD_LOGGING_DIR (this run does)", _set_logging_dir
    ),
    "use_mps_device": Argument(bool, False, "leave it out, MPS is used where there is one", lambda *_: None),
    "include_inputs_for_metrics": Argument(bool, False, "write include_for_metrics=['inputs']", _add_inputs),
    "include_tokens_per_second": Argument(bool | None, False, "write include_num_input_tokens_seen", _count_tokens),
    "save_safetensors": Argument(bool | None, True, "leave it out, weights are always saved as safetensors"),
    "jit_mode_eval": Argument(bool, False, "leave it out; torch_compile=True is what makes evaluation faster"),
    "use_ipex": Argument(bool, False, "leave it out; PyTorch itself optimizes for Intel processors"),
    "fp16_opt_level": Argument(str, "O1", "leave it out and write fp16=True or bf16=True; Apex is not supported"),
    "half_precision_backend": Argument(str, "auto", "leave it out; mixed precision is always PyTorch's own"),
    "fp16_backend": Argument(str, "auto", "leave it out; mixed precision is always PyTorch's own"),
    "tpu_num_cores": Argument(int | None, None, "leave it out; accelerate launch starts one process per core"),
    "tpu_metrics_debug": Argument(bool, False, "write debug='tpu_metrics_debug'"),
    "past_index": Argument(int, -1, "leave it out; no hidden state is carried from batch to batch"),
    "use_legacy_prediction_loop": Argument(bool, False, "leave it out; there is one prediction loop"),
    "mp_parameters": Argument(str, "", "leave it out; SageMaker's launcher sets the environment"),
    "torchdynamo": Argument(str | None, None, "write torch_compile_backend"),
    "ray_scope": Argument(str | None, "last", "set the environment variable RAY_SCOPE"),
}
"""The dropped arguments by name."""
