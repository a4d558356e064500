"""A command line for dataclasses: finds the field for each flag, and builds the instances."""

from __future__ import annotations

import dataclasses
import difflib
import sys
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from trimtab_common.config.fields import Computed, check_ranges, short_name
from trimtab_common.config.help_text import REQUIRED, Flag, help_text, type_name
from trimtab_common.config.records import plain
from trimtab_common.config.values import ConfigError, decode, read_flags, read_settings, readings

SYNONYMS = {
    **dict.fromkeys(("model_name_or_path", "base_model", "model_name", "model_path"), "model"),
    **dict.fromkeys(("model_revision", "revision"), "model_init_kwargs.revision"),
    **dict.fromkeys(("attn_implementation", "flash_attn"), "model_init_kwargs.attn_implementation"),
    **dict.fromkeys(("dataset_name", "dataset_path", "train_file"), "dataset"),
    **dict.fromkeys(("eval_dataset_name", "validation_file", "eval_file"), "eval_dataset"),
    **dict.fromkeys(("max_seq_length", "max_seq_len", "cutoff_len", "sequence_len"), "max_length"),
    **dict.fromkeys(("use_peft", "use_lora", "lora_rank"), "lora_r"),
    **dict.fromkeys(("template", "chat_template_path"), "chat_template"),
    **dict.fromkeys(("reward_funcs", "reward_function", "reward_model", "reward_model_path"), "reward"),
    "reward_model_name_or_path": "reward",
    "dataset_config_name": "dataset_config",
    "dataset_train_split": "split",
    "dataset_test_split": "eval_split",
    "torch_dtype": "dtype",
    "lora_target": "lora_target_modules",
    "quantization_bit": "load_in_4bit",
    "load_in_8bit": "load_in_4bit",
    **dict.fromkeys(("micro_batch_size", "batch_size", "train_batch_size"), "per_device_train_batch_size"),
    **dict.fromkeys(("epochs", "num_epochs"), "num_train_epochs"),
    "lr": "learning_rate",
    "max_new_tokens": "max_completion_length",
    "max_completion_length": "max_new_tokens",
    "max_steps": "steps",
    "pref_beta": "beta",
    **dict.fromkeys(("bf16", "fp16"), "mixed_precision"),
    "mixed_precision": "accelerator_kwargs.mixed_precision",
    "gradient_checkpointing_use_reentrant": "gradient_checkpointing_kwargs.use_reentrant",
}
"""Names in the commands of other libraries, and ours; a name with a dot is an entry of a dict."""
ONLY_IN_PYTHON = {
    **dict.fromkeys(
        ("lora_dropout", "lora_modules_to_save", "lora_target_parameters", "use_rslora", "use_dora"),
        "Train in Python, with peft_config=LoraConfig(...).",
    ),
    **dict.fromkeys(
        ("bnb_4bit_quant_type", "bnb_4bit_quant_storage", "use_bnb_nested_quant"),
        "Train in Python, with model_init_kwargs={'quantization_config': BitsAndBytesConfig(...)}.",
    ),
    **dict.fromkeys(
        ("model_revision", "revision", "attn_implementation", "flash_attn"),
        "Train in Python, with a model that from_pretrained loads with it.",
    ),
    **dict.fromkeys(
        ("eos_token", "pad_token"),
        "Set it on the tokenizer in Python, save model and tokenizer into a folder, and name the folder in --model.",
    ),
    "dataset_streaming": "Train in Python, with load_dataset(..., streaming=True).",
}
"""Names in the commands of other libraries that no command has, and what to do."""


@dataclasses.dataclass
class _Section:
    """One dataclass of the command line, and the values of its fields so far."""

    kind: type
    short: str
    fields: dict[str, dataclasses.Field[object]]
    hints: dict[str, Any]
    computed: set[str]
    values: dict[str, object] = dataclasses.field(default_factory=dict)


def parse_config(
    *dataclass_types: type,
    argv: Sequence[str] | None = None,
    description: str | None = None,
    recipe: Mapping[str, object] | None = None,
    program: str | None = None,
    without: Collection[str] = (),
) -> tuple[Any, ...]:
    """Builds one instance of each dataclass from a recipe, the YAML files that the flags name, and the flags.

    Args:
        dataclass_types: The classes, in the order of the result.
        argv: The words of the command line; by default those of the running program.
        description: What the program does, for --help.
        recipe: Settings of the program, by the names that a file may have. They replace the classes' defaults, in
            --help too.
        program: How the program is started, in --help and messages. None: its file, or python -m with its module.
        without: Fields that get no flags, as computed fields do not.

    Returns:
        An instance of each class.

    Raises:
        SystemExit: With status 0 after --help or --help-all; with status 2 and a message at stderr for a setting that
            does not exist or has a wrong value, a ValueError or ImportError of `__post_init__` included.
    """
    argv, program = list(sys.argv[1:] if argv is None else argv), program or _program()
    sections = [_section(kind, without) for kind in dataclass_types]
    try:
        _apply(sections, [(name, [value]) for name, value in (recipe or {}).items()], prefix="recipe: ")
        if not {"-h", "--help", "--help-all"}.isdisjoint(argv):
            flags_by_title = {f"{one.kind.__name__} (also as --{one.short}.name)": _flags(one) for one in sections}
            print(help_text(program, description, flags_by_title, everything="--help-all" in argv))
            raise SystemExit(0)
        flags = list(read_flags(argv))
        for file in [str(words[0]) for name, words in flags if name == "config"]:
            _apply(sections, [(name, [value]) for name, value in read_settings(file).items()], prefix=f"{file}: ")
        _apply(sections, [(name, values) for name, values in flags if name != "config"], prefix="--")
        return tuple(_build(section) for section in sections)
    except ConfigError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _program() -> str:
    """How the program was started, as messages name it: its file, or python -m with its module."""
    spec = sys.modules["__main__"].__spec__
    return Path(sys.argv[0]).name if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"


def _section(kind: type, without: Collection[str]) -> _Section:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    computed = {name for name, one in fields.items() if not one.init or isinstance(one.metadata.get("help"), Computed)}
    flags = {name: one for name, one in fields.items() if name not in computed and name not in without}
    return _Section(kind, short_name(kind), flags, typing.get_type_hints(kind), computed)


def _apply(sections: list[_Section], settings: Iterable[tuple[str, list[object]]], prefix: str) -> None:
    """Sets fields; a flag with the class's name overrides one without it."""
    general: list[tuple[_Section, str, list[str], list[object]]] = []
    specific = general.copy()
    for name, words in settings:
        for section, field, path, field_words in _resolve(sections, name, words, prefix):
            named_class = name.partition(".")[0] == section.short and name != field
            (specific if named_class else general).append((section, field, path, field_words))
    for section, field, path, field_words in general + specific:
        section.values[field] = _coerce(section, field, path, field_words, prefix)


def _resolve(
    sections: list[_Section], name: str, words: list[object], prefix: str
) -> Iterator[tuple[_Section, str, list[str], list[object]]]:
    """The fields that a name means: (section, field, path inside a dict, words)."""
    head, *path = name.split(".")
    owner = next((section for section in sections if section.short == head), None)
    inner = path[0].replace("-", "_") if owner and path else head
    if owner and path and inner in owner.fields:
        found = [(owner, inner, path[1:], words)]
    else:
        found = [(section, head, path, words) for section in sections if head in section.fields]
    if found and not _is_replaced(sections, [section for section, *_ in found], found[0][1]):
        yield from found
    elif owner and not path and isinstance(value := decode(words[0]), Mapping):
        for key, part in value.items():
            yield from _resolve(sections, f"{head}.{key}", [part], prefix)
    elif any(inner in section.computed for section in sections):
        raise ConfigError(f"{prefix}{name} is no setting, because it is computed. Leave it out.")
    else:
        fields_by_class = {section.short: section.fields for section in sections}
        raise ConfigError(f"{prefix}{unknown_setting(name, fields_by_class)}")


def _is_replaced(sections: list[_Section], holders: list[_Section], field: str) -> bool:
    """Whether a field is deprecated, and another class has its successor or only Python has the setting."""
    helps = [str(section.fields[field].metadata.get("help", "")) for section in holders]
    others = [section for section in sections if section not in holders]
    is_elsewhere = any(SYNONYMS.get(field) in section.fields for section in others)
    return all(text.startswith("Deprecated") for text in helps) and (is_elsewhere or field in ONLY_IN_PYTHON)


def unknown_setting(name: str, fields_by_class: Mapping[str, Iterable[str]]) -> str:
    """What is said of a name that is no setting.

    Args:
        name: as it was written, with its class if it had one.
        fields_by_class: names of fields, by the short name of their class.
    """
    fields = [(short, field) for short, names in fields_by_class.items() for field in names]
    names = [*(field for _, field in fields), *(f"{short}.{field}" for short, field in fields)]
    field = name.rpartition(".")[2].replace("-", "_")
    ours = SYNONYMS.get(field, "")
    for known in (ours, SYNONYMS.get(ours, "")):
        if known.partition(".")[0] in names:
            return f"{name} is not a setting. Did you mean {known}?"
    if field in ONLY_IN_PYTHON:
        return f"{name} is not a setting of the command line. {ONLY_IN_PYTHON[field]}"
    near = difflib.get_close_matches(name, names, n=1)
    return f"{name} is not a setting. {f'Did you mean {near[0]}?' if near else '--help lists the names.'}"


def _coerce(section: _Section, field: str, path: list[str], words: list[object], prefix: str) -> Any:
    """The words as a value of the field's type."""
    adapter: TypeAdapter[Any] = TypeAdapter(section.hints[field], config=ConfigDict(arbitrary_types_allowed=True))
    candidates = [_nest(section, field, path, reading) for reading in readings(words)]
    problems: list[ErrorDetails] = []
    for strict in (True, False):  # strictly first: 3 for `int | str` is a number
        for candidate in candidates:
            try:
                value = adapter.validate_python(candidate, strict=strict)
            except ValidationError as error:
                problems += [] if strict else error.errors()
                continue
            if isinstance(value, bool) or not isinstance(candidate, bool):  # True is no number
                return value
    shown, text = ".".join([field, *path]), " ".join(str(word) for word in words)
    # The most specific problem lies deepest inside the value; of several as deep, the likeliest reading's is the first.
    why = f" ({max(problems, key=lambda problem: len(problem['loc']))['msg']})" if problems else ""
    raise ConfigError(f"{prefix}{shown}: got {text!r}, expected {type_name(section.hints[field])}{why}.")


def _nest(section: _Section, field: str, path: list[str], value: object) -> object:
    """Returns the value; with a path, the field's present dict with the value at that path."""
    if not path:
        return value
    present = section.values.get(field, _default(section.fields[field]))
    nested: Any = value
    for key in reversed(path):
        nested = {key: nested}
    return _merge(present, nested) if isinstance(present, Mapping) else nested


def _merge(old: Mapping[str, object], new: Mapping[str, object]) -> dict[str, object]:
    merged = dict(old)
    for key, value in new.items():
        before = merged.get(key)
        merged[key] = _merge(before, value) if isinstance(before, Mapping) and isinstance(value, Mapping) else value
    return merged


def _build(section: _Section) -> object:
    unset = {name: field for name, field in section.fields.items() if name not in section.values}
    absent = [name for name, field in unset.items() if _default(field) is dataclasses.MISSING]
    if absent:
        raise ConfigError(f"{section.kind.__name__} needs a value for --{', --'.join(absent)}.")
    try:
        built: Any = section.kind(**section.values)
        check_ranges(built)
        return built
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{section.kind.__name__}: {error}") from error


def _default(field: dataclasses.Field[object]) -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _flags(section: _Section) -> Iterator[Flag]:
    for name, field in section.fields.items():
        default = section.values.get(name, _default(field))
        shown = REQUIRED if default is dataclasses.MISSING else f"default {plain(default)!r}"
        yield Flag.of(section.kind, field, section.hints[name], default=shown, is_set=name in section.values)
