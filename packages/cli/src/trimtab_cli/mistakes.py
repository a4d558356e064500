"""Finds faults in the words of a command without the seconds in which a trainer is imported."""

import ast
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from trimtab_common.config import read_settings
from trimtab_common.config.command_line import unknown_setting
from trimtab_common.config.values import decode, read_flags

RECORD = Path(__file__).with_name("flags.json")
"""The settings of each subcommand, by class, and those of transformers.TrainingArguments.

`python -m tests.cli.test_help` writes it from the configurations; a test compares it with them.
"""
INHERITED = "TrainingArguments"


def mistake_in(name: str, words: Sequence[str]) -> str | None:
    """What is wrong with the names of flags and of lines of `--config` files, with a model or with a dataset.

    A setting must have each name, a path must exist, and the hub must answer if the run needs it.

    Args:
        name: the subcommand.
        words: those after it.

    Returns:
        None if no fault shows without the libraries, or if the subcommand has no record.
    """
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    names_a_trainer = name == "memory" and not "".join(words[:1]).startswith("-")
    if name not in record or names_a_trainer:  # trimtab memory says itself which trainers it counts
        return None
    fields: dict[str, list[str]] = record[name]["settings"]
    if (trainer := record[name]["inherits"]) is not None:
        fields[trainer] += record[INHERITED]
    try:
        flags = list(read_flags(words))
        files = [str(values[0]) for flag, values in flags if flag == "config"]
        lines = [(f"{file}: ", *line) for file in files for line in read_settings(file).items()]
        lines += [("--", flag, values[0]) for flag, values in flags if flag != "config"]
        for prefix, each, _ in lines:
            if not is_known(each, fields, record[name]["computed"]) and trainer is not None:
                fields[trainer] += training_arguments()  # a newer transformers may have more than the record
            if not is_known(each, fields, record[name]["computed"]):
                return prefix + unknown_setting(each, fields)
        refuse_absent(dict(values_of(((each, value) for _, each, value in lines), fields)))
    except ValueError as error:
        return str(error)
    return None


def is_known(name: str, fields: Mapping[str, Sequence[str]], computed: Sequence[str]) -> bool:
    """Whether a setting has this name: a field of a class, `class.field`, or the name of a class."""
    head, *path = name.split(".")
    inner = path[0].replace("-", "_") if path else head
    is_field = any(head in names for names in fields.values()) or head in computed
    return is_field or (head in fields and (not path or inner in [*fields[head], *computed]))


def values_of(lines: Iterable[tuple[str, object]], classes: Collection[str]) -> Iterator[tuple[str, object]]:
    """The settings without the names of their classes, `dpo.beta` and `dpo: {beta: ...}` as `beta`."""
    for name, word in lines:
        head, _, rest = name.partition(".")
        if head in classes and not rest and isinstance(value := decode(word), Mapping):
            yield from value.items()
        else:
            yield (rest if head in classes and rest else name), word


def refuse_absent(settings: Mapping[str, object]) -> None:
    """Raise ValueError for a model or a dataset that does not exist, or a hub that is needed and does not answer."""
    named = [name for name in ("model", "dataset", "eval_dataset") if isinstance(settings.get(name), str)]
    if not named:
        return
    from .places import refuse_missing_path, require_hub  # whose import takes longer than the rest

    for name in named:
        refuse_missing_path(str(settings[name]))
    if "model" in named:
        require_hub(str(settings["model"]), uploads=decode(settings.get("push_to_hub")) is True)


def training_arguments() -> list[str]:
    """Fields of the installed transformers.TrainingArguments, by its source: its import takes seconds."""
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).with_name("training_args.py").read_text(encoding="utf-8"))
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == INHERITED)
    lines = (line.target for line in kind.body if isinstance(line, ast.AnnAssign))
    return [target.id for target in lines if isinstance(target, ast.Name)]
