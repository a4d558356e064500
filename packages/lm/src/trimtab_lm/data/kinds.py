"""Checks whether a column holds texts or conversations."""

import reprlib
from collections.abc import Mapping, Sequence
from typing import cast

from trimtab_lm.data.media import check_messages

NEEDED = {"text": "a text", "messages": "a list of messages such as {'role': 'user', 'content': 'Hello'}"}


def check_texts(*kinds: str, **values: object) -> None:
    """Raises ValueError unless each value is a text, or a conversation, whose messages have a role and hold text.

    Args:
        kinds: "text" or "messages" if only that kind is accepted; conversations must then have messages.
    """
    for name, value in values.items():
        fits = {"text": isinstance(value, str), "messages": _is_conversation(value) and (not kinds or value)}
        if not any(fits[kind] for kind in kinds or fits):
            raise ValueError(
                f"The {name} is {reprlib.repr(value)} ({type(value).__name__}): "
                f"{', or '.join(NEEDED[kind] for kind in kinds or fits)} is needed. Convert it with dataset.map, or "
                "drop the row."
            )
        if not isinstance(value, str):
            check_messages(cast(Sequence[object], value))


def require_template(template: object) -> None:
    """Raises ValueError unless there is a chat template, by which a conversation becomes a text."""
    if not template:
        raise ValueError(
            "This is a conversation, and the tokenizer has no chat template, as those of base models. Set one: "
            "--chat_template chatml, FILE or MODEL on the command line; tokenizer.chat_template = ... in Python."
        )


def _is_conversation(value: object) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return False
    return all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str | Sequence | None)
        for message in value
    )
