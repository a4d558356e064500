"""Decorators that let configs and trainers accept the arguments of old TRL (0.7 to 0.11), with a FutureWarning.

The decorated classes themselves know only the present names. A config accepts every argument of TrainingArguments that
transformers 5 has dropped (`ARGUMENTS`), and its own former arguments:

    @dataclass
    @takes_arguments_of_2024(DPO_ARGUMENTS)
    class DPOConfig(TrainingArguments): ...

A constructor with the present parameters also accepts its old signature (`DPO`, `SFT`, ...):

    class DPOTrainer(Trainer):
        @takes_constructor_of_2024(DPOConfig, DPO)
        def __init__(self, model, ref_model=None, args=None, ..., processing_class=None, ...): ...

Its `args` is always a DPOConfig. Each translation warns at the caller's line and names the new spelling. An argument
without a successor, and an old and a new spelling with different values, raise a ValueError.
"""

import copy
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from numbers import Real
from types import CodeType, FrameType
from typing import Any, TypeAlias, TypeVar, cast

from transformers import (
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import IntervalStrategy

from trimtab_common.sealing import checkpoints, keep_under_other_name
from trimtab_lm.compat.arguments import set_gpus
from trimtab_lm.hf.config import CHECKPOINTING
from trimtab_lm.legacy.translations import ARGUMENTS, Argument, conflict, defaults_of

Config = TypeVar("Config", bound=TrainingArguments)
CHECKED = "_is_checked"
"""The attribute of a config whose constructor has finished; later assignments are translated one by one."""
Constructor: TypeAlias = Callable[..., None]


def takes_arguments_of_2024(further: Mapping[str, Argument] | None = None) -> Callable[[type[Config]], type[Config]]:
    """Decorates a TrainingArguments class so that it also accepts old arguments; put it below @dataclass.

    It adds `ARGUMENTS`, `further` and `overwrite_output_dir`. A value other than the documented default is translated
    before `__post_init__`, or when it is assigned to an existing config. Its field then holds the default again, so
    that `dataclasses.replace` and a rebuild from `to_dict` keep the setting and do not warn. A default that is written
    out cannot be told from one that is left out. Documented values that transformers 5 refuses (`report_to=None`,
    `bf16=None`, `fsdp=""`) mean none.

    Args:
        further: old arguments of this class, by name.
    """
    arguments = ARGUMENTS | dict(further or {})
    return lambda cls: _with_old_arguments(cls, arguments)


def _with_old_arguments(cls: type[Config], arguments: Mapping[str, Argument]) -> type[Config]:
    """Adds the arguments to a config class, which is returned."""
    post_init, as_dict = cls.__post_init__, cls.to_dict

    @functools.wraps(post_init)
    def __post_init__(self: Config) -> None:
        _translate_names(self, arguments)
        _translate_values(self)
        post_init(self)
        vars(self)[CHECKED] = True

    def __setattr__(self: Config, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name in arguments and CHECKED in vars(self) and value not in (None, arguments[name].default):
            _translate_late(self, name, arguments)

    @functools.wraps(as_dict)
    def to_dict(self: Config) -> dict[str, Any]:
        return {name: value for name, value in as_dict(self).items() if name not in arguments}

    members: dict[str, object] = {"__post_init__": __post_init__, "__setattr__": __setattr__, "to_dict": to_dict}
    members["__repr__"] = TrainingArguments.__repr__  # the one of @dataclass would show tokens
    members["overwrite_output_dir"] = dataclasses.field(default=False, metadata={"help": SetCheckpointsAside.help})
    for name, old in arguments.items():
        members[name] = dataclasses.field(default=old.default, metadata={"help": f"Deprecated: {old.advice}."})
    for name, member in members.items():
        setattr(cls, name, member)
    types: dict[str, object] = {name: old.annotation for name, old in arguments.items()}
    cls.__annotations__ = inspect.get_annotations(cls) | {"overwrite_output_dir": bool} | types
    return cls


def _translate_names(config: TrainingArguments, arguments: Mapping[str, Argument]) -> None:
    """Translates the old arguments that a config sets, and puts their defaults back."""
    values = {name: getattr(config, name) for name in arguments}
    for name, value in values.items():
        old = arguments[name]
        if value is None or value == old.default:
            continue
        if old.translate is None:
            raise ValueError(f"{name}={value!r} is not supported: {old.advice}.")
        old.translate(config, name, value)
        _warn(f"{name} is deprecated: {old.advice}.")
    for name, old in arguments.items():
        setattr(config, name, old.default)


def _translate_late(config: TrainingArguments, name: str, arguments: Mapping[str, Argument]) -> None:
    """Translates an old argument that is assigned to an existing config."""
    if name in ("no_cuda", "use_mps_device", "dispatch_batches", "split_batches") or name.startswith("fsdp_"):
        raise ValueError(
            f"{name}={getattr(config, name)!r} was set on a {type(config).__name__} after its constructor had chosen "
            f"the device and the engine. Pass the setting to the constructor: {arguments[name].advice}."
        )
    _translate_names(config, arguments)
    if config.eval_strategy == IntervalStrategy.STEPS and not config.eval_steps:
        config.eval_steps = config.logging_steps


def _translate_values(config: TrainingArguments) -> None:
    """Replaces documented values that transformers 5 refuses."""
    config.report_to = "none" if config.report_to is None else config.report_to
    config.bf16 = bool(config.bf16)
    config.fsdp = config.fsdp or None
    # These names are documented, so transformers must not warn about them.
    for new, old in ((CHECKPOINTING + end, f"gradient_checkpointing{end}") for end in ("", "_kwargs")):
        setattr(config, new, getattr(config, old) if getattr(config, new) is None else getattr(config, new))


class SetCheckpointsAside(TrainerCallback):
    """Renames the checkpoints of an earlier run when training starts, for `overwrite_output_dir=True`."""

    help = (
        "A run that does not resume renames the checkpoint-N folders in output_dir to _replaced-1-checkpoint-N. No run "
        "resumes from them, save_total_limit does not count them, and none is deleted."
    )

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Renames the folders, unless the run resumes or this process does not save."""
        if state.global_step > 0 or not args.should_save:
            return
        for folder in checkpoints(str(args.output_dir)).values():
            keep_under_other_name(folder)


def config_from(args: TrainingArguments | None, kind: type[Config], **changes: object) -> Config:
    """Returns a `kind` with the settings of `args` and the changes. It does not change `args`.

    Args:
        args: an instance of `kind`, which is returned itself if there are no changes; a plain TrainingArguments; or
            None for the defaults with output_dir "trainer_output".

    Raises:
        TypeError: args is no TrainingArguments.
        ValueError: args sets a field that `kind` does not have, or sets a changed field to a third value.
    """
    if isinstance(args, kind):
        if not changes:
            return args
        kind = type(args)
    values, defaults = _settings(args, kind), defaults_of(kind)
    for name, value in changes.items():
        present = values.get(name, defaults[name])
        if present not in (defaults[name], value):
            raise ValueError(conflict(f"{name}, on the constructor,", f"{kind.__name__}.{name}", value, present))
    config = kind(**values | changes)
    if args is not None:
        set_gpus(config, args.n_gpu)  # scripts set it to 1 against DataParallel
    return config


def _settings(args: TrainingArguments | None, kind: type[TrainingArguments]) -> dict[str, Any]:
    """Returns the fields of `kind` that `args` has. Copies dicts and lists, because transformers writes into some."""
    if args is None:
        return {"output_dir": "trainer_output"}
    if not isinstance(args, TrainingArguments):
        raise TypeError(f"args is a {type(args).__name__}; a {kind.__name__} or None is needed.")
    unset, wanted = defaults_of(type(args)), defaults_of(kind)
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(args) if field.init}
    values |= {name: value for name, value in vars(args).items() if name in ARGUMENTS}  # assigned to a plain one
    if lost := ", ".join(name for name in values if name not in wanted and values[name] != unset[name]):
        raise ValueError(f"args is a {type(args).__name__} that sets {lost}, which {kind.__name__} does not have.")
    kept = {name: value for name, value in values.items() if name in wanted}
    return {name: copy.copy(value) if isinstance(value, dict | list) else value for name, value in kept.items()}


_TRAINER: dict[str, object] = {
    "model": None, "args": None, "data_collator": None, "train_dataset": None, "eval_dataset": None,
    "tokenizer": None, "model_init": None, "compute_metrics": None, "callbacks": None, "optimizers": (None, None),
    "preprocess_logits_for_metrics": None,
}  # fmt: skip
REWARD = _TRAINER | {"max_length": None, "peft_config": None}
SFT = _TRAINER | {
    "peft_config": None, "dataset_text_field": None, "packing": False, "formatting_func": None,
    "max_seq_length": None, "infinite": None, "num_of_sequences": 1024, "chars_per_token": 3.6,
    "dataset_num_proc": None, "dataset_batch_size": 1000, "neftune_noise_alpha": None, "model_init_kwargs": None,
    "dataset_kwargs": None, "eval_packing": None,
}  # fmt: skip
DPO: dict[str, object] = {
    "model": None, "ref_model": None, "beta": 0.1, "label_smoothing": 0, "loss_type": "sigmoid", "args": None,
    "data_collator": None, "label_pad_token_id": -100, "padding_value": 0, "truncation_mode": "keep_end",
    "train_dataset": None, "eval_dataset": None, "tokenizer": None, "model_init": None, "callbacks": None,
    "optimizers": (None, None), "preprocess_logits_for_metrics": None, "max_length": None, "max_prompt_length": None,
    "max_target_length": None, "peft_config": None, "is_encoder_decoder": None, "disable_dropout": True,
    "generate_during_eval": False, "compute_metrics": None, "precompute_ref_log_probs": False,
    "model_init_kwargs": None, "ref_model_init_kwargs": None, "model_adapter_name": None, "ref_adapter_name": None,
    "dataset_num_proc": None, "reference_free": False, "force_use_ref_model": False,
}  # fmt: skip
ITERATIVE_SFT: dict[str, object] = {
    "model": None, "args": None, "tokenizer": None, "optimizers": (None, None), "data_collator": None,
    "eval_dataset": None, "max_length": None, "truncation_mode": "keep_end", "preprocess_logits_for_metrics": None,
    "compute_metrics": None, "optimize_device_cache": False,
}  # fmt: skip
"""The constructors of old TRL: parameters with their documented defaults, in the order of 0.7, then new ones of 0.9."""

NEW_NAMES = {"tokenizer": "processing_class", "max_seq_length": "max_length"}
"""The present name of a constructor's argument, where it differs from the old one."""

NONE_IS_A_VALUE = ("dataset_batch_size",)
"""The constructors' arguments for which None was more than a default: here all rows at once."""

TOLD_BY = {"beta": Real, "max_length": Real, "dataset_text_field": str, "tokenizer": PreTrainedTokenizerBase}
"""The types that positional arguments have in the old order only, at the places where the two orders differ."""


def takes_constructor_of_2024(
    kind: type[TrainingArguments], signature: Mapping[str, object] | None = None
) -> Callable[[Constructor], Constructor]:
    """Decorates a trainer's `__init__` so that it also accepts the arguments of old TRL.

    `__init__` itself has the present parameters, `args` and `processing_class` among them. Its `args` is always a
    `kind`; callers may pass one, None or a plain TrainingArguments. Old arguments that are not present parameters are
    set on a copy of the config; None is the same as no argument, except in `NONE_IS_A_VALUE`.

    Positional arguments have the present order. They have the old order if the first argument at which the two differ
    has the type that the old order wants there (a number for DPO's beta, a tokenizer for IterativeSFT), or if there are
    too many for the present order. `inspect.signature` shows the present parameters, then the old ones with their
    documented defaults.

    Args:
        signature: the old constructor, such as `DPO`.

    Raises:
        TypeError: an old argument has no field in `kind`. The decorated constructor raises it too, for unknown and
            repeated arguments.
        ValueError: raised by the decorated constructor, for an argument that differs from the config's value.
    """

    def decorate(init: Constructor) -> Constructor:
        title = init.__qualname__.split(".")[-2]
        present = inspect.signature(init)
        documented = {**(signature or {}), "tokenizer": None}
        old = {name: default for name, default in documented.items() if name not in present.parameters}
        fields = {field.name for field in dataclasses.fields(kind)} | {"processing_class"}
        if unknown := ", ".join(name for name in old if NEW_NAMES.get(name, name) not in fields):
            raise TypeError(f"{title}: {kind.__name__} has no field for {unknown} of the old constructor.")

        @functools.wraps(init)
        def __init__(self: Trainer, *args: object, **kwargs: object) -> None:
            arguments = _bind(title, args, kwargs, present, list(signature or {}))
            old_arguments = {name: arguments.pop(name) for name in old if name in arguments}
            changes = {
                name: value for name, value in old_arguments.items() if value is not None or name in NONE_IS_A_VALUE
            }
            _translate_arguments(title, arguments, changes, kind)
            init(self, **arguments)
            if arguments["args"].overwrite_output_dir:
                self.add_callback(SetCheckpointsAside)

        vars(__init__)["__signature__"] = _shown(present, old)
        return __init__

    return decorate


def refuses_arguments_of_2024(**advice: str) -> Callable[[Constructor], Constructor]:
    """Decorates a trainer's `__init__` so that arguments without a successor raise an error that explains.

    Args:
        advice: what to write instead, by the name of the argument.

    Raises:
        TypeError: raised by the decorated constructor, for such an argument unless it is None.
    """

    def decorate(init: Constructor) -> Constructor:
        @functools.wraps(init)
        def __init__(self: object, *args: object, **kwargs: object) -> None:
            for name in advice.keys() & kwargs.keys():
                if kwargs.pop(name) is not None:
                    raise TypeError(f"{init.__qualname__.split('.')[-2]}({name}=...) is not supported: {advice[name]}.")
            init(self, *args, **kwargs)

        return __init__

    return decorate


def _bind(
    title: str, args: tuple[object, ...], kwargs: dict[str, object], present: inspect.Signature, old_order: list[str]
) -> dict[str, Any]:
    """Returns every argument by its name."""
    parameters = present.parameters.items()
    order = [name for name, parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD][1:]
    order = old_order if _is_old_order(args, order, old_order) else order
    if len(args) > len(order):
        raise TypeError(f"{title}() takes {len(order)} positional arguments but {len(args)} were given")
    bound = dict(zip(order, args, strict=False))
    for name in bound.keys() & kwargs.keys():
        raise TypeError(f"{title}() got multiple values for argument {name!r}")
    return bound | kwargs


def _is_old_order(args: tuple[object, ...], order: list[str], old_order: list[str]) -> bool:
    """Whether positional arguments are in the old order, by the first at which the two orders differ."""
    for position, name in enumerate(old_order[: len(args)]):
        if [NEW_NAMES.get(name, name)] != order[position : position + 1]:
            return len(args) > len(order) or isinstance(args[position], TOLD_BY.get(name, ()))
    return False


def _translate_arguments(
    title: str, arguments: dict[str, Any], old: dict[str, Any], kind: type[TrainingArguments]
) -> None:
    """Moves the old arguments into `arguments`, makes its `args` a `kind`, and warns."""
    tokenizer, args = old.pop("tokenizer", None), arguments.get("args")
    if tokenizer is not None:
        if arguments.get("processing_class") not in (None, tokenizer):
            raise ValueError(f"{title} got tokenizer and another processing_class. Give processing_class alone.")
        arguments["processing_class"] = tokenizer
        _warn(f"{title}(tokenizer=...) is deprecated: write processing_class.")
    changes = {NEW_NAMES.get(name, name): value for name, value in old.items()}
    arguments["args"] = config_from(args, kind, **changes)
    if old:
        before, after = (", ".join(f"{name}=..." for name in names) for names in (old, changes))
        _warn(f"{title}({before}) is deprecated: write args={kind.__name__}({after}).")
    if args is not None and not isinstance(args, kind):
        _warn(f"{title}: args is a {type(args).__name__}: write {kind.__name__}, which takes the same settings.")


def _shown(present: inspect.Signature, old: Mapping[str, object]) -> inspect.Signature:
    """Returns the present signature with the old arguments as keywords after it."""
    parameters = list(present.parameters.values())
    rest = [parameters.pop()] if parameters[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default) for name, default in old.items()]
    return present.replace(parameters=[*parameters, *added, *rest])


def _warn(message: str) -> None:
    """Issues a FutureWarning at the line that builds the config or the trainer."""
    frame, level = cast(FrameType, cast(FrameType, inspect.currentframe()).f_back), 2
    while frame.f_back is not None and _is_between(frame.f_globals.get("__name__", ""), frame.f_code):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, FutureWarning, stacklevel=level)


def _is_between(module: str, code: CodeType) -> bool:
    """Whether a frame is between the user's line and the warning: library code, or a config's generated code."""
    ours = module.partition(".")[0] in ("trimtab_lm", "trimtab_common", "transformers", "dataclasses")
    return ours or code.co_name == "__post_init__" or (code.co_filename, code.co_name) == ("<string>", "__init__")
