"""Removes the nulls that Arrow writes into messages, tools and settings if rows of a dataset have different keys."""

from collections.abc import Mapping
from typing import Any

CONVERSATIONS = ("messages", "conversations", "prompt", "query", "completion", "chosen", "rejected")
NULL_ARGUMENTS = (
    "Arguments of tool calls are null: Arrow writes null where a call lacks an argument that another call of the "
    "dataset has. These arguments are left out, also where null was meant. To keep a null, give the arguments as JSON "
    "text."
)


def without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row without null entries in its messages, tools and settings of the chat template.

    The content of a message stays, null or not.
    """
    cleaned = dict(row)
    for name in CONVERSATIONS:
        if _has_messages(row.get(name)):
            cleaned[name] = [
                {key: _filled(value) for key, value in message.items() if value is not None or key == "content"}
                for message in row[name]
            ]
    if isinstance(row.get("tools"), list):
        cleaned["tools"] = _filled(row["tools"])
    if isinstance(row.get("chat_template_kwargs"), Mapping):
        cleaned["chat_template_kwargs"] = _filled(row["chat_template_kwargs"])
    return cleaned


def has_null_arguments(row: Mapping[str, Any]) -> bool:
    """Whether `without_nulls` leaves out an argument of a tool call."""
    messages = [message for name in CONVERSATIONS if _has_messages(row.get(name)) for message in row[name]]
    calls = [call for message in messages for call in message.get("tool_calls") or []]
    arguments = [(call.get("function") or call).get("arguments") for call in calls if isinstance(call, Mapping)]
    return any(isinstance(one, Mapping) and _filled(one) != one for one in arguments)


def _has_messages(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(message, Mapping) for message in value)


def _filled(value: Any) -> Any:
    """Returns the value without null entries of its dicts, at any depth."""
    if isinstance(value, Mapping):
        return {name: _filled(one) for name, one in value.items() if one is not None}
    return [_filled(one) for one in value] if isinstance(value, list) else value
