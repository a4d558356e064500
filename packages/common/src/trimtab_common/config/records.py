"""Converts configurations to plain values without secrets, for trackers and for checkpoints."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from trimtab_common.config.fields import short_name

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SECRET = re.compile(r"(^|[._-])(token|key|auth)$|apikey|passw(or)?d|secret|credential|authorization|cookie", re.I)
"""Names of settings that hold credentials."""
CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")  # user and password in a URL


def to_flat_dict(*configs: DataclassInstance) -> dict[str, object]:
    """Every field of every configuration as plain values, for a tracker.

    Entries of a dict get dotted names. A name on which two configurations differ is preceded by the class, as on the
    command line. Secrets are left out, see `without_secrets`, and so are fields whose help begins with "Deprecated:",
    which hold nothing after their translation.
    """
    flat: dict[str, object] = {}
    rows = [
        (short_name(type(config)), field.name, getattr(config, field.name))
        for config in configs
        for field in dataclasses.fields(config)
        if not field.metadata.get("help", "").startswith("Deprecated:")
    ]
    for short, name, value in rows:
        differs = any(other_name == name and other != value for _, other_name, other in rows)
        flat.update(_flatten(f"{short}.{name}" if differs else name, value))
    return flat


def flattened(nested: Mapping[str, Any], separator: str = "/", prefix: str = "") -> dict[str, Any]:
    """Flattens nested dicts: the names of the levels are joined by the separator; leaves other values unchanged."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, separator, f"{prefix}{name}{separator}")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _flatten(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flatten(f"{name}.{key}", inner)
    elif not SECRET.search(name):
        yield name, without_secrets(plain(value))


def plain(value: object) -> object:
    """Converts an enum to its value, a tuple to a list, and an object that JSON does not support to text."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None), dict)) else str(value)


def without_secrets(value: object) -> object:
    """Removes values with secret names, and users and passwords in URLs, from a plain value.

    Args:
        value: dicts and lists are copied, and searched at any depth. Their entries named token, key, password, secret,
            credentials, authorization or cookie, or something like it, are left out.
    """
    if isinstance(value, Mapping):
        return {name: without_secrets(inner) for name, inner in value.items() if not SECRET.search(str(name))}
    if isinstance(value, (list, tuple)):
        return [without_secrets(item) for item in value]
    return CREDENTIALS.sub("", value) if isinstance(value, str) else value
