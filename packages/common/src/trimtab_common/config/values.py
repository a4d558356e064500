"""Parses values from text: words of the command line, and YAML files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

LONGEST_ALIASES = 100_000
"""Characters that the aliases of a YAML file may stand for."""


class ConfigError(ValueError):
    """A setting does not exist, or has a value that it cannot have."""


def read_settings(file: str | Path) -> dict[str, object]:
    """Reads the settings of a YAML file, by their names.

    Args:
        file: A file of lines `name: value`, as --config takes it.

    Raises:
        ConfigError: If the file cannot be read, or holds something else.
    """
    content = read_yaml(file)
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: holds {type(content).__name__}; lines of `name: value` are needed.")
    return {str(key): value for key, value in content.items()}


def read_yaml(file: str | Path) -> object:
    """Returns the content of a YAML file; ConfigError if it is unreadable, repeats a key, or has oversized aliases."""
    try:
        return yaml.load(Path(file).read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # invalid bytes, impossible dates, too much nesting
        raise ConfigError(f"{file}: not readable as YAML: {error}") from error


class _Loader(yaml.SafeLoader):
    """Loads YAML with the floats of YAML 1.2, unique keys, and aliases of at most `LONGEST_ALIASES` characters in all.

    PyYAML takes 1e-4 and -.5 for text, keeps the last of equal keys, and lets aliases of aliases stand for gigabytes.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                name, line = key.value, key.start_mark.line + 1
                if name in lines:
                    raise yaml.YAMLError(f"line {line} sets {name!r}, and so does line {lines[name]}. Remove one.")
                lines[name] = line
        return node

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _written_out(node, {}) > node.end_mark.index + LONGEST_ALIASES:
            raise yaml.YAMLError(
                f"its aliases stand for more than {LONGEST_ALIASES:,} characters. Write out the parts that you need."
            )
        return node


def _written_out(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Counts a node's characters with its aliases written out; `known` caches the counts by node id."""
    if id(node) not in known:
        known[id(node)] = None
        parts = [] if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in parts for part in pair]
        known[id(node)] = sum(_written_out(part, known) for part in parts) or len(node.value) + 1
    if (length := known[id(node)]) is None:
        raise yaml.YAMLError(f"line {node.start_mark.line + 1}: a value holds an alias of itself. Write it out.")
    return length


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.\d+([eE][-+]?\d+)?|\d+\.?\d*[eE][-+]?\d+)$"),
    [*"-+.0123456789"],
)


def read_flags(argv: Sequence[str]) -> Iterator[tuple[str, list[object]]]:
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


def readings(words: list[object]) -> list[object]:
    """Returns the possible meanings of words, the likeliest first; only command-line text has more than one."""
    if len(words) > 1:
        return [[decode(word) for word in words], words]
    (word,) = words
    if not isinstance(word, str):
        return [word]
    decoded = decode(word)
    if decoded is None:
        return [None]  # the word None is never meant as a text
    return [decoded, word, [decoded], [word]]


def decode(word: object) -> object:
    """Parses a word of the command line as a Python literal, JSON or YAML; returns any other word as text."""
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
