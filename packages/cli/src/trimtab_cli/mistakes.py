"""Answers a mistyped name of a setting from a record, in place of the seconds in which a trainer is imported."""

import ast
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from trimtab_common.config import ConfigError, read_settings
from trimtab_common.config.command_line import unknown_setting
from trimtab_common.config.values import read_flags

RECORD = Path(__file__).with_name("flags.json")
"""The settings of each subcommand, by class, and those of transformers.TrainingArguments.

`python -m tests.cli.test_help` writes it from the configurations; a test compares it with them.
"""
INHERITED = "TrainingArguments"


def mistake_in(name: str, words: Sequence[str]) -> str | None:
    """What is wrong with the first name of a flag, or of a line of a `--config` file, that no setting has.

    Args:
        name: the subcommand.
        words: those after it.

    Returns:
        None if all names are known, or if the subcommand has no record. Values are not looked at.
    """
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    if name not in record:
        return None
    fields: dict[str, list[str]] = record[name]["settings"]
    if (trainer := record[name]["inherits"]) is not None:
        fields[trainer] += {*record[INHERITED], *training_arguments()}
    try:
        flags = list(read_flags(words))
        files = [str(values[0]) for flag, values in flags if flag == "config"]
        named = [(f"{file}: ", each) for file in files for each in read_settings(file)]
        for prefix, each in [*named, *(("--", flag) for flag, _ in flags if flag != "config")]:
            head, *path = each.split(".")
            inner = path[0].replace("-", "_") if path else head
            is_field = any(head in names for names in fields.values()) or head in record[name]["computed"]
            is_in_class = head in fields and (not path or inner in [*fields[head], *record[name]["computed"]])
            if not (is_field or is_in_class):
                return prefix + unknown_setting(each, fields)
    except ConfigError as error:
        return str(error)
    return None


def training_arguments() -> list[str]:
    """Fields of the installed transformers.TrainingArguments, by its source: its import takes seconds."""
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).with_name("training_args.py").read_text(encoding="utf-8"))
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == INHERITED)
    lines = (line.target for line in kind.body if isinstance(line, ast.AnnAssign))
    return [target.id for target in lines if isinstance(target, ast.Name)]
