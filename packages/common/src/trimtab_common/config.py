"""Dataclasses as the command line: flags, a YAML file, and whatever a W&B sweep agent passes.

Every field is a flag, `--learning_rate 1e-4`, `--learning-rate=1e-4`, unless it is computed. `--help` lists those of
the algorithm, `--help-all` those that come from other libraries too. Values may be Python literals (`--x=['a', 'b']`,
`--x=None`, `--flag=False`), JSON or YAML (`--x=[a, b]`), or several words for a list.

    --ppo.learning_rate=1e-4      the field of PPOConfig only; `ppo` is the class name without Config, in snake case
    --ppo={'learning_rate': 1e-4} several fields of one class, as a nested sweep parameter arrives
    --tracker_kwargs.project=x    one entry of a field that holds a dict
    --config file.yaml            the same names, flat or under the class; flags override the file

A name that several classes have, without the class before it, sets the field in each; with the class it wins.
A program's recipe sets the same names before the file does, in place of the classes' defaults.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import math
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from trimtab_common.help_text import Computed, Flag, help_text, type_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def script_name() -> str:
    """The running script's file name without its ending, as a default name of runs."""
    return Path(sys.argv[0]).stem or "interactive"


@dataclasses.dataclass(frozen=True)
class Range:
    """The values that a setting may have: in words, and as a test."""

    words: str
    holds: Callable[[float], bool]


Count = Annotated[int, Range("a whole number of at least 1", lambda value: value >= 1 and value % 1 == 0)]
CountFromZero = Annotated[int, Range("a whole number, 0 or above", lambda value: value >= 0 and value % 1 == 0)]
Positive = Annotated[float, Range("a finite number above 0", lambda value: math.isfinite(value) and value > 0)]
NotNegative = Annotated[float, Range("a finite number, 0 or above", lambda value: math.isfinite(value) and value >= 0)]
Share = Annotated[float, Range("a number above 0 and up to 1", lambda value: 0 < value <= 1)]
Decay = Annotated[float, Range("a number from 0 to below 1", lambda value: 0 <= value < 1)]
Fraction = Annotated[float, Range("a number from 0 to 1", lambda value: 0 <= value <= 1)]
Seed = Annotated[int, Range("in [0, 2**32), the range that NumPy takes", lambda value: 0 <= value < 2**32)]


def setting(text: str, **default: Any) -> Any:
    """A field of a configuration with its line of help; `default` or `default_factory` as for dataclasses.field."""
    return dataclasses.field(**default, metadata={"help": text})


def computed(text: str) -> Any:
    """A field that follows from other fields, or that a trainer fills in: None before, and no flag."""
    return dataclasses.field(default=None, metadata={"help": Computed(text)})


def check_ranges(config: DataclassInstance) -> None:
    """Raises ValueError for the first field whose value is outside the range that its annotation names.

    None is in the range of a field that is annotated with it, such as Count | None.
    """
    hints = typing.get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        within, value = _range_of(hints[field.name]), getattr(config, field.name)
        is_absent = value is None and type(None) in typing.get_args(hints[field.name])
        is_number = isinstance(value, typing.SupportsFloat)
        if within is not None and not is_absent and not (is_number and within.holds(value)):
            raise ValueError(f"{field.name}={value if is_number else repr(value)} must be {within.words}.")


def _range_of(hint: object) -> Range | None:
    """The range of an annotation: of Count, or of Count | None."""
    inside = [part if isinstance(part, Range) else _range_of(part) for part in typing.get_args(hint)]
    return next((part for part in inside if part is not None), None)


def _program() -> str:
    """How the program was started, as messages name it: its file, or python -m with its module."""
    spec = sys.modules["__main__"].__spec__
    return Path(sys.argv[0]).name if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"


class ConfigError(ValueError):
    """A setting does not exist, or has a value that it cannot have."""


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
        argv: The words of the command line. None: those of the running program.
        description: What the program does, for --help.
        recipe: Settings of the program, by the names that a file may have. They replace the classes' defaults, in
            --help too.
        program: How the program is started, in --help and messages. None: its file, or python -m with its module.
        without: Fields that are no flags, and are left to their class, as computed ones are.

    Returns:
        An instance of each class.

    Raises:
        SystemExit: With status 0 after --help or --help-all; with status 2 and a message at stderr for a setting that
            does not exist or has a wrong value, a ValueError of `__post_init__` included.
    """
    argv, program = list(sys.argv[1:] if argv is None else argv), program or _program()
    sections = [_section(kind, without) for kind in dataclass_types]
    try:
        _apply(sections, [(name, [value]) for name, value in (recipe or {}).items()], prefix="recipe: ")
        if not {"-h", "--help", "--help-all"}.isdisjoint(argv):
            flags_by_title = {f"{one.kind.__name__} (also as --{one.short}.name)": _flags(one) for one in sections}
            print(help_text(program, description, flags_by_title, everything="--help-all" in argv))
            raise SystemExit(0)
        flags = list(_read_flags(argv))
        for file in [str(words[0]) for name, words in flags if name == "config"]:
            _apply(sections, [(name, [value]) for name, value in read_settings(file).items()], prefix=f"{file}: ")
        _apply(sections, [(name, values) for name, values in flags if name != "config"], prefix="--")
        return tuple(_build(section) for section in sections)
    except ConfigError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def to_flat_dict(*configs: DataclassInstance) -> dict[str, object]:
    """Every field of every configuration as plain values, for a tracker.

    Entries of a dict get dotted names. A name on which two configurations differ is preceded by the class, as on the
    command line. Secrets are left out, see `without_secrets`, and so are fields whose help begins with "Deprecated:",
    which hold nothing after their translation.
    """
    flat: dict[str, object] = {}
    rows = [
        (_short(type(config)), field.name, getattr(config, field.name))
        for config in configs
        for field in dataclasses.fields(config)
        if not field.metadata.get("help", "").startswith("Deprecated:")
    ]
    for short, name, value in rows:
        differs = any(other_name == name and other != value for _, other_name, other in rows)
        flat.update(_flatten(f"{short}.{name}" if differs else name, value))
    return flat


def _flatten(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flatten(f"{name}.{key}", inner)
    elif not SECRET.search(name):
        yield name, without_secrets(_plain(value))


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None), dict)) else str(value)


SECRET = re.compile(r"(^|[._-])(token|key|auth)$|apikey|passw(or)?d|secret|credential|authorization|cookie", re.I)
"""Names of what services know a user by."""
CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")  # user and password in a URL


def without_secrets(value: object) -> object:
    """A plain value without what its names say is secret, and without user and password in its URLs.

    Args:
        value: dicts and lists are copied, and searched at any depth. Their entries named token, key, password, secret,
            credentials, authorization or cookie, or something like it, are left out.
    """
    if isinstance(value, Mapping):
        return {name: without_secrets(inner) for name, inner in value.items() if not SECRET.search(str(name))}
    if isinstance(value, (list, tuple)):
        return [without_secrets(item) for item in value]
    return CREDENTIALS.sub("", value) if isinstance(value, str) else value


def _section(kind: type, without: Collection[str]) -> _Section:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    computed = {name for name, one in fields.items() if not one.init or isinstance(one.metadata.get("help"), Computed)}
    flags = {name: one for name, one in fields.items() if name not in computed and name not in without}
    return _Section(kind, _short(kind), flags, typing.get_type_hints(kind), computed)


def _short(kind: type) -> str:
    """PPOConfig -> ppo, IterativeSFTConfig -> iterative_sft."""
    stem = re.sub(r"(Config|Arguments)$", "", kind.__name__) or kind.__name__
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", stem).lower()


def _read_flags(argv: Sequence[str]) -> Iterator[tuple[str, list[object]]]:
    """(name, words after it) of each flag; a flag without a word is true."""
    position = 0
    while position < len(argv):
        flag, equals, value = argv[position].partition("=")
        position += 1
        if not flag.startswith("--") or flag == "--":
            raise ConfigError(f"{flag!r} belongs to no flag. Write --name=value; --help lists the names.")
        words: list[object] = [value] if equals else []
        while not equals and position < len(argv) and not argv[position].startswith("--"):
            words.append(argv[position])
            position += 1
        head, dot, last = flag.removeprefix("--").rpartition(".")  # - for _ in names of fields, not in keys of dicts
        name = f"{head.replace('-', '_')}.{last}" if dot else last.replace("-", "_")
        if name == "config" and len(words) != 1:
            raise ConfigError("--config needs the name of one YAML file.")
        yield name, words or [True]


def read_settings(file: str | Path) -> dict[str, object]:
    """Reads the settings of a YAML file.

    Args:
        file: A file of lines `name: value`, as --config takes it.

    Returns:
        The values by name.

    Raises:
        ConfigError: If the file cannot be read, or holds something else.
    """
    try:
        content = yaml.load(Path(file).read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # of bytes, dates and depth that cannot be
        raise ConfigError(f"{file}: not readable as YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: holds {type(content).__name__}; lines of `name: value` are needed.")
    return {str(key): value for key, value in content.items()}


class _Loader(yaml.SafeLoader):
    """YAML 1.2's floats: PyYAML takes 1e-4, without a dot, for text."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+\.?\d*[eE][-+]?\d+$"), [*"-+0123456789"])


def _apply(sections: list[_Section], settings: Iterable[tuple[str, list[object]]], prefix: str) -> None:
    """Set fields; what names the class comes after what does not, so that it wins."""
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
    holders = [section for section in sections if head in section.fields]
    if owner and path and inner in owner.fields:
        yield owner, inner, path[1:], words
    elif holders:
        yield from ((section, head, path, words) for section in holders)
    elif owner and not path and isinstance(value := _decode(words[0]), Mapping):
        for key, part in value.items():
            yield from _resolve(sections, f"{head}.{key}", [part], prefix)
    elif any(inner in section.computed for section in sections):
        raise ConfigError(f"{prefix}{name} is no setting, because it is computed. Leave it out.")
    else:
        fields = [(section.short, field) for section in sections for field in section.fields]
        names = [*(field for _, field in fields), *(f"{short}.{field}" for short, field in fields)]
        near = difflib.get_close_matches(name, names, n=1)
        advice = f"Did you mean {near[0]}?" if near else "--help lists the names."
        raise ConfigError(f"{prefix}{name} is not a setting. {advice}")


def _coerce(section: _Section, field: str, path: list[str], words: list[object], prefix: str) -> Any:
    """The words as a value of the field's type."""
    adapter: TypeAdapter[Any] = TypeAdapter(section.hints[field], config=ConfigDict(arbitrary_types_allowed=True))
    candidates = [_nest(section, field, path, reading) for reading in _readings(words)]
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
    raise ConfigError(f"{prefix}{shown}: {text!r} came in, {type_name(section.hints[field])} is needed{why}.")


def _readings(words: list[object]) -> list[object]:
    """What words may mean, the likeliest first; only text from the command line has more than one meaning."""
    if len(words) > 1:
        return [[_decode(word) for word in words], words]
    (word,) = words
    if not isinstance(word, str):
        return [word]
    decoded = _decode(word)
    if decoded is None:
        return [None]  # the word None is never meant as a text
    return [decoded, word, [decoded], [word]]


def _decode(word: object) -> object:
    """A word of the command line as a Python literal, JSON or YAML; text if it is none of them."""
    if not isinstance(word, str):
        return word
    try:
        value = ast.literal_eval(word.strip())
    except (ValueError, SyntaxError):
        if word.lower() not in ("true", "false", "null") and word[:1] not in ("[", "{"):
            return word
        try:
            value = yaml.load(word, Loader=_Loader)
        except yaml.YAMLError:
            return word
    return word if isinstance(value, (str, bytes)) else value


def _nest(section: _Section, field: str, path: list[str], value: object) -> object:
    """The value, or with a path the field's present dict with the value put there."""
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
        return section.kind(**section.values)
    except ValueError as error:
        raise ConfigError(f"{section.kind.__name__}: {error}") from error


def _default(field: dataclasses.Field[object]) -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _flags(section: _Section) -> Iterator[Flag]:
    for name, field in section.fields.items():
        default = section.values.get(name, _default(field))
        shown = "required" if default is dataclasses.MISSING else f"default {_plain(default)!r}"
        yield Flag.of(section.kind, field, section.hints[name], default=shown, is_set=name in section.values)
