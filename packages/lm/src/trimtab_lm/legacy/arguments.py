"""The arguments of 2024, translated: trainers and configs know only today's.

A config accepts every TrainingArguments name of 2024 that transformers 5 dropped (`ARGUMENTS`):

    @dataclass
    @takes_arguments_of_2024
    class DPOConfig(TrainingArguments): ...

and a constructor, whose parameters are today's, accepts its signature of 2024 beside them (`DPO`, `SFT`, ...):

    class DPOTrainer(Trainer):
        @takes_constructor_of_2024(DPOConfig, DPO)
        def __init__(self, model, ref_model=None, args=None, ..., processing_class=None, ...): ...

It gets `args` as a DPOConfig, always. Each translation gives a FutureWarning, at the caller's line, that names the
new spelling; a name without meaning today, and an old and a new spelling that differ, are ValueErrors.
"""

import copy
import dataclasses
import functools
import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, TypeVar

from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import IntervalStrategy

from trimtab_common.sealing import checkpoints, keep_under_other_name
from trimtab_lm.hf.config import CHECKPOINTING

Config = TypeVar("Config", bound=TrainingArguments)
CHECKED = "_is_checked"
"""The attribute of a config that has been translated and checked once; later assignments are translated one by one."""
Constructor = Callable[..., None]


def takes_arguments_of_2024(cls: type[Config]) -> type[Config]:
    """Class decorator, below @dataclass: adds `ARGUMENTS` and `overwrite_output_dir` to a TrainingArguments class.

    A value other than the documented default is translated before `__post_init__`, or when it is assigned to a config
    that exists. Its field then holds the default again, so that `dataclasses.replace` and a rebuild out of `to_dict`
    keep the setting and do not warn. An old default that is written out looks like one that was left out. Documented
    values that transformers 5 refuses (`report_to=None`, `bf16=None`, `fsdp=""`) mean what they meant: none.
    """
    own_init, own_to_dict = cls.__post_init__, cls.to_dict

    @functools.wraps(own_init)
    def __post_init__(self: Config) -> None:
        _translate_names(self)
        _translate_values(self)
        own_init(self)
        vars(self)[CHECKED] = True

    def __setattr__(self: Config, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in ARGUMENTS and CHECKED in vars(self) and value not in (None, ARGUMENTS[name].default):
            _translate_late(self, name)

    @functools.wraps(own_to_dict)
    def to_dict(self: Config) -> dict[str, Any]:
        return {name: value for name, value in own_to_dict(self).items() if name not in ARGUMENTS}

    shown = TrainingArguments.__repr__  # @dataclass would write one that shows tokens
    members: dict[str, Any] = {
        "__post_init__": __post_init__, "__setattr__": __setattr__, "to_dict": to_dict, "__repr__": shown
    }  # fmt: skip
    members["overwrite_output_dir"] = dataclasses.field(default=False, metadata={"help": SetCheckpointsAside.help})
    for name, old in ARGUMENTS.items():
        members[name] = dataclasses.field(default=old.default, metadata={"help": f"Deprecated: {old.advice}."})
    for name, member in members.items():
        setattr(cls, name, member)
    types = {"overwrite_output_dir": bool} | {name: old.annotation for name, old in ARGUMENTS.items()}
    cls.__annotations__ = inspect.get_annotations(cls) | types
    return cls


def _translate_names(config: TrainingArguments) -> None:
    given = {name: value for name in ARGUMENTS
             if (value := getattr(config, name)) is not None and value != ARGUMENTS[name].default}  # fmt: skip
    for name, value in given.items():
        old = ARGUMENTS[name]
        if old.translate is None:
            raise ValueError(f"{name}={value!r} has no meaning since transformers 5: {old.advice}.")
        old.translate(config, name, value)
        _warn(f"{name} is an argument of 2024: {old.advice}.")
    for name, old in ARGUMENTS.items():
        setattr(config, name, old.default)


def _translate_late(config: TrainingArguments, name: str) -> None:
    """What is assigned to a config that is made already."""
    if name in ("no_cuda", "use_mps_device", "dispatch_batches", "split_batches") or name.startswith("fsdp_"):
        raise ValueError(
            f"{name}={getattr(config, name)!r} was set on a {type(config).__name__} that has chosen its device and "
            f"engine already. Give it to the constructor, where it would say: {ARGUMENTS[name].advice}."
        )
    _translate_names(config)
    if config.eval_strategy == IntervalStrategy.STEPS and not config.eval_steps:
        config.eval_steps = config.logging_steps


def _translate_values(config: TrainingArguments) -> None:
    config.report_to = "none" if config.report_to is None else config.report_to
    config.bf16 = bool(config.bf16)
    config.fsdp = config.fsdp or None
    # Documented names, and a documented default: transformers' warning about them is not for the user.
    for new, old in ((CHECKPOINTING + end, f"gradient_checkpointing{end}") for end in ("", "_kwargs")):
        setattr(config, new, getattr(config, old) if getattr(config, new) is None else getattr(config, new))


class Argument(NamedTuple):
    """A TrainingArguments name of 2024. translate(config, name, value) sets today's; without it nothing is left."""

    annotation: Any
    default: Any
    advice: str
    translate: Callable[[Any, str, Any], None] | None = None


def _set(config: Any, old: str, new: str, value: Any) -> None:
    present = getattr(config, new)
    if present not in (_defaults(type(config))[new], value):
        raise ValueError(_conflict(old, new, value, present))
    setattr(config, new, value)


def _renamed(annotation: Any, default: Any, new: str, constant: Any = None) -> Argument:
    """The field `new` takes the value, or for a flag the constant."""
    return Argument(
        annotation, default, f"write {new}" if constant is None else f"write {new}={constant!r}",
        lambda config, old, value: _set(config, old, new, value if constant is None else constant),
    )  # fmt: skip


def _entry(annotation: Any, default: Any, holder: str, key: str, **also: Any) -> Argument:
    """The entry `key` of the dict field `holder` takes the value; `also`: entries that it needs beside it."""

    def translate(config: Any, old: str, value: Any) -> None:
        present = getattr(config, holder)
        if isinstance(present, str):
            raise ValueError(f"{old} cannot go into {holder}={present!r}: write {key!r} there and leave {old} out.")
        if isinstance(present, AcceleratorConfig):
            unset = AcceleratorConfig().to_dict()
            present = {name: entry for name, entry in present.to_dict().items() if entry != unset[name]}
        entries = {name.removeprefix("fsdp_"): entry for name, entry in (present or {}).items()}
        for name, entry in {key: value, **also}.items():
            if entries.setdefault(name, entry) != entry:
                raise ValueError(_conflict(old, f"{holder}[{name!r}]", entry, entries[name]))
        setattr(config, holder, entries)

    entries = ", ".join([f"{key!r}: ...", *(f"{name!r}: {entry!r}" for name, entry in also.items())])
    return Argument(annotation, default, f"write {holder}={{{entries}}}", translate)


def _conflict(old: str, new: str, value: Any, present: Any) -> str:
    shown = "" if "token" in new else f": {value!r} and {present!r}"
    return f"{old} and {new} are both given and differ{shown}. Give {new} alone."


def _set_warmup(config: Any, old: str, ratio: float) -> None:
    if not 0 <= ratio <= 1:
        raise ValueError(f"warmup_ratio={ratio} came in; a part of all steps, from 0 to 1, is needed.")
    # warmup_steps=1.0 would be one step; the float below it is all of them
    _set(config, old, "warmup_steps", min(ratio, math.nextafter(1.0, 0.0)))


def _add_inputs(config: Any, old: str, value: Any) -> None:
    config.include_for_metrics = list(dict.fromkeys([*config.include_for_metrics, "inputs"]))


def _count_tokens(config: Any, old: str, value: Any) -> None:
    if config.include_num_input_tokens_seen in (False, "no"):  # either way of counting gives the rate
        config.include_num_input_tokens_seen = "all"


def _set_repository(config: Any, old: str, value: Any) -> None:
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
        str | None, None, "fsdp_config", "transformer_layer_cls_to_wrap", auto_wrap_policy="TRANSFORMER_BASED_WRAP"),
    "dispatch_batches": _entry(bool | None, None, "accelerator_config", "dispatch_batches"),
    "split_batches": _entry(bool | None, False, "accelerator_config", "split_batches"),
    "push_to_hub_model_id": Argument(str | None, None, "write hub_model_id='owner/name'", _set_repository),
    "push_to_hub_organization": Argument(str | None, None, "write hub_model_id='owner/name'", _set_repository),
    "warmup_ratio": Argument(float, 0.0, "write warmup_steps, which below 1 is a ratio", _set_warmup),
    "logging_dir": Argument(str | None, None, "set the environment variable TENSORBOARD_LOGGING_DIR (it is, now)",
        lambda config, old, value: os.environ.update(TENSORBOARD_LOGGING_DIR=str(value))),
    "use_mps_device": Argument(bool, False, "leave it out, MPS is used where it is there", lambda *given: None),
    "include_inputs_for_metrics": Argument(bool, False, "write include_for_metrics=['inputs']", _add_inputs),
    "include_tokens_per_second": Argument(bool | None, False, "write include_num_input_tokens_seen", _count_tokens),
    "save_safetensors": Argument(bool | None, True, "leave it out, weights are always saved as safetensors"),
    "jit_mode_eval": Argument(bool, False, "leave it out; torch_compile=True is what makes evaluation faster"),
    "use_ipex": Argument(bool, False, "leave it out; what IPEX did on Intel processors is in PyTorch itself"),
    "fp16_opt_level": Argument(str, "O1", "leave it out and write fp16=True or bf16=True; there is no Apex any more"),
    "half_precision_backend": Argument(str, "auto", "leave it out; mixed precision is always PyTorch's own"),
    "fp16_backend": Argument(str, "auto", "leave it out; mixed precision is always PyTorch's own"),
    "tpu_num_cores": Argument(int | None, None, "leave it out and start one process per core by accelerate launch"),
    "tpu_metrics_debug": Argument(bool, False, "write debug='tpu_metrics_debug'"),
    "past_index": Argument(int, -1, "leave it out; no hidden state is carried from batch to batch"),
    "use_legacy_prediction_loop": Argument(bool, False, "leave it out; there is one prediction loop"),
    "mp_parameters": Argument(str, "", "leave it out; SageMaker's launcher tells the Trainer by its environment"),
    "torchdynamo": Argument(str | None, None, "write torch_compile_backend"),
    "ray_scope": Argument(str | None, "last", "set the environment variable RAY_SCOPE"),
}  # fmt: skip
"""Name of 2024 -> type, documented default, what to write today, and how it is translated."""


class SetCheckpointsAside(TrainerCallback):
    """`overwrite_output_dir=True`: the checkpoints of an earlier run are not taken for those of this one."""

    help = (
        "A training that starts anew, rather than resumes, renames the checkpoint-N folders in output_dir to "
        "replaced-1-checkpoint-N: they are neither resumed from nor counted by save_total_limit. None is deleted."
    )

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 0 or not args.should_save:
            return
        for folder in checkpoints(str(args.output_dir)).values():
            keep_under_other_name(folder)


def config_from(args: TrainingArguments | None, kind: type[Config], **changes: Any) -> Config:
    """A `kind` with the settings of `args`, which is not changed; an instance of `kind` is returned as it is.

    args: None means the defaults, with output_dir "trainer_output"; changes: fields to set, on a copy in every case.
    Raises TypeError for what is no TrainingArguments, ValueError for a setting that `kind` does not have and for a
    change of a field that `args` sets to another value than the default.
    """
    if isinstance(args, kind):
        if not changes:
            return args
        kind = type(args)
    values, defaults = _settings(args, kind), _defaults(kind)
    for name, value in changes.items():
        present = values.get(name, defaults[name])
        if present not in (defaults[name], value):
            raise ValueError(_conflict(f"{name}, on the constructor,", f"{kind.__name__}.{name}", value, present))
    config = kind(**values | changes)
    if args is not None:
        config._n_gpu = args.n_gpu  # which scripts set, to keep DataParallel away
    return config


def _settings(args: TrainingArguments | None, kind: type[TrainingArguments]) -> dict[str, Any]:
    """The fields of `kind` that `args` has; dicts and lists copied, because transformers fills some of them in."""
    if args is None:
        return {"output_dir": "trainer_output"}
    if not isinstance(args, TrainingArguments):
        raise TypeError(f"args is a {type(args).__name__}; a {kind.__name__} or None is needed.")
    unset, wanted = _defaults(type(args)), _defaults(kind)
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(args) if field.init}
    values |= {name: value for name, value in vars(args).items() if name in ARGUMENTS}  # assigned to a plain one
    if lost := ", ".join(name for name in values if name not in wanted and values[name] != unset[name]):
        raise ValueError(f"args is a {type(args).__name__} that sets {lost}, which {kind.__name__} does not have.")
    return {name: copy.copy(value) if isinstance(value, (dict, list)) else value
            for name, value in values.items() if name in wanted}  # fmt: skip


def _defaults(kind: type[TrainingArguments]) -> dict[str, Any]:
    return {field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            for field in dataclasses.fields(kind)}  # fmt: skip


_TRAINER = {
    "model": None, "args": None, "data_collator": None, "train_dataset": None, "eval_dataset": None,
    "tokenizer": None, "model_init": None, "compute_metrics": None, "callbacks": None, "optimizers": (None, None),
    "preprocess_logits_for_metrics": None,
}  # fmt: skip
REWARD: dict[str, Any] = _TRAINER | {"max_length": None, "peft_config": None}
SFT: dict[str, Any] = _TRAINER | {
    "peft_config": None, "dataset_text_field": None, "packing": False, "formatting_func": None,
    "max_seq_length": None, "infinite": None, "num_of_sequences": 1024, "chars_per_token": 3.6,
    "dataset_num_proc": None, "dataset_batch_size": 1000, "neftune_noise_alpha": None, "model_init_kwargs": None,
    "dataset_kwargs": None,
}  # fmt: skip
DPO: dict[str, Any] = {
    "model": None, "ref_model": None, "beta": 0.1, "label_smoothing": 0, "loss_type": "sigmoid", "args": None,
    "data_collator": None, "label_pad_token_id": -100, "padding_value": 0, "truncation_mode": "keep_end",
    "train_dataset": None, "eval_dataset": None, "tokenizer": None, "model_init": None, "callbacks": None,
    "optimizers": (None, None), "preprocess_logits_for_metrics": None, "max_length": None, "max_prompt_length": None,
    "max_target_length": None, "peft_config": None, "is_encoder_decoder": None, "disable_dropout": True,
    "generate_during_eval": False, "compute_metrics": None, "precompute_ref_log_probs": False,
    "model_init_kwargs": None, "ref_model_init_kwargs": None, "model_adapter_name": None, "ref_adapter_name": None,
}  # fmt: skip
ITERATIVE_SFT: dict[str, Any] = {
    "model": None, "args": None, "tokenizer": None, "optimizers": (None, None), "data_collator": None,
    "eval_dataset": None, "max_length": None, "truncation_mode": "keep_end", "preprocess_logits_for_metrics": None,
    "compute_metrics": None, "optimize_device_cache": False,
}  # fmt: skip
"""Constructors of 2024: parameter -> documented default, in their order."""

NEW_NAMES = {"tokenizer": "processing_class", "max_seq_length": "max_length"}
"""Constructor argument of 2024 -> today's parameter or field, where the name differs."""

TOLD_BY = {"beta": Real, "max_length": Real, "dataset_text_field": str, "tokenizer": PreTrainedTokenizerBase}
"""Where the order of 2024 leaves today's: the type by which a positional argument shows that it is meant."""


def takes_constructor_of_2024(
    kind: type[TrainingArguments], signature: Mapping[str, Any] | None = None
) -> Callable[[Constructor], Constructor]:
    """Decorator of a trainer's `__init__`, whose parameters, `args` and `processing_class` among them, are today's.

    kind: the trainer's config. `args` may be one, None or a plain TrainingArguments; `__init__` gets a `kind`.
    signature: the constructor of 2024, such as `DPO`. What of it is no parameter today is set on a copy of the config;
        None where that was the documented default counts as not given, every other value as given.

    Positional arguments are read in today's order; in 2024's where the first that differs has the type that belongs
    there (a number for DPO's beta, a tokenizer for IterativeSFT) or where there are too many for today's.
    `inspect.signature` shows today's parameters, then 2024's with their documented defaults.

    Raises TypeError as Python does for unknown and doubled arguments, ValueError for a value that differs from one
    that the config sets; and, when it decorates, TypeError for an old name that has no place today.
    """

    def decorate(init: Constructor) -> Constructor:
        title = init.__qualname__.split(".")[-2]
        today = inspect.signature(init)
        old = {name: default for name, default in (dict(signature or {}) | {"tokenizer": None}).items()
               if name not in today.parameters}  # fmt: skip
        places = {field.name for field in dataclasses.fields(kind)} | {"processing_class"}
        if homeless := ", ".join(name for name in old if NEW_NAMES.get(name, name) not in places):
            raise TypeError(f"{title}: {kind.__name__} has no field for {homeless}, of 2024's constructor.")

        @functools.wraps(init)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            given = _bind(title, args, kwargs, today, list(signature or {}))
            past = {name: value for name in old if name in given
                    if (value := given.pop(name)) is not None or old[name] is not None}  # fmt: skip
            _write_as_today(title, given, past, kind)
            init(self, **given)
            if given["args"].overwrite_output_dir:
                self.add_callback(SetCheckpointsAside)

        vars(__init__)["__signature__"] = _shown(today, old)
        return __init__

    return decorate


def _bind(
    title: str, args: tuple[Any, ...], kwargs: dict[str, Any], today: inspect.Signature, past: list[str]
) -> dict[str, Any]:
    """Every argument by its name, in the order that the positional ones are meant in."""
    order = [name for name, parameter in today.parameters.items()
             if parameter.kind is parameter.POSITIONAL_OR_KEYWORD][1:]  # fmt: skip
    order = past if _is_order_of_2024(args, order, past) else order
    if len(args) > len(order):
        raise TypeError(f"{title}() takes {len(order)} positional arguments but {len(args)} were given")
    bound = dict(zip(order, args, strict=False))
    for name in bound.keys() & kwargs.keys():
        raise TypeError(f"{title}() got multiple values for argument {name!r}")
    return bound | kwargs


def _is_order_of_2024(args: tuple[Any, ...], today: list[str], past: list[str]) -> bool:
    for position, name in enumerate(past[: len(args)]):
        if [NEW_NAMES.get(name, name)] != today[position : position + 1]:
            return len(args) > len(today) or isinstance(args[position], TOLD_BY.get(name, ()))
    return False


def _write_as_today(title: str, given: dict[str, Any], past: dict[str, Any], kind: type[TrainingArguments]) -> None:
    """Put the arguments of 2024, `past`, where today's are in `given`, and make `args` a `kind`."""
    tokenizer, args = past.pop("tokenizer", None), given.get("args")
    if tokenizer is not None:
        if given.get("processing_class") not in (None, tokenizer):
            raise ValueError(f"{title} got tokenizer and another processing_class. Give processing_class alone.")
        given["processing_class"] = tokenizer
        _warn(f"{title}(tokenizer=...) is an argument of 2024: write processing_class.")
    moved = {NEW_NAMES.get(name, name): value for name, value in past.items()}
    given["args"] = config_from(args, kind, **moved)
    if past:
        old, new = (", ".join(f"{name}=..." for name in names) for names in (past, moved))
        _warn(f"{title}({old}) is the form of 2024: write args={kind.__name__}({new}).")
    if args is not None and not isinstance(args, kind):
        _warn(f"{title}: args is a {type(args).__name__}: write {kind.__name__}, which takes the same settings.")


def _shown(today: inspect.Signature, old: Mapping[str, Any]) -> inspect.Signature:
    parameters = list(today.parameters.values())
    rest = [parameters.pop()] if parameters[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default) for name, default in old.items()]
    return today.replace(parameters=[*parameters, *added, *rest])


def _warn(message: str) -> None:
    """A FutureWarning at the line that made the config or the trainer."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_between(frame.f_globals.get("__name__", ""), frame.f_code):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, FutureWarning, stacklevel=level)


def _is_between(module: str, code: CodeType) -> bool:
    """Is it our code, a library's, or what @dataclass or a subclass's __post_init__ put on the way?"""
    ours = module.partition(".")[0] in ("trimtab_lm", "trimtab_common", "transformers", "dataclasses")
    return ours or code.co_name == "__post_init__" or (code.co_filename, code.co_name) == ("<string>", "__init__")
