"""Refuses images, videos and sounds: every trainer learns from text only, and would silently ignore them."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from datasets import Audio, Image, Video

NAMED = re.compile(r"(image|video|audio)(s|_urls?)?|pixel_values(_videos)?|input_features")
"""Columns, keys and content-block types for images, videos and sounds."""
PLACEHOLDER = re.compile("<(image|video|audio)>")
REMEDY = (
    "The trainers learn from text alone. Remove it (dataset.remove_columns, dataset.filter or dataset.map) to train on "
    "the text, or train with a library for vision and audio models."
)


def check_features(dataset: object) -> None:
    """Raises ValueError if a dataset declares a column of images, videos or sounds."""
    features: Any = getattr(dataset, "features", None) or {}
    if names := [name for name, feature in features.items() if _holds_media(feature)]:
        raise ValueError(f"The dataset's column {names[0]!r} holds images, videos or sounds. {REMEDY}")


def check_row(row: Mapping[str, Any]) -> None:
    """Raises ValueError for a value that is an image, a video or a sound.

    A text or number in a column called `image` may be a caption or a label, and passes. The path of an image passes
    too, unless a text of the row has a place for the image.
    """
    for name, value in row.items():
        if NAMED.fullmatch(name):
            is_media = not _is_plain(value) or (bool(value) and PLACEHOLDER.search(str(row)) is not None)
        else:
            is_media = _is_media(value)
        if is_media:
            raise ValueError(f"The column {name!r} holds an image, a video or a sound. {REMEDY}")


def check_messages(messages: Iterable[Any]) -> None:
    """Raises ValueError for a message with an image, a video or a sound, or with its address."""
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        blocks = [block for block in content if isinstance(block, Mapping)] if isinstance(content, list | tuple) else []
        keys = [name for part in (message, *blocks) for name, value in part.items() if value and NAMED.fullmatch(name)]
        kinds = [str(block.get("type")).removeprefix("input_") for block in blocks]
        if found := keys + [kind for kind in kinds if NAMED.fullmatch(kind)]:
            raise ValueError(f"A message of role {message.get('role')!r} holds {found[0]!r}. {REMEDY}")


def _holds_media(feature: Any) -> bool:
    if isinstance(feature, Mapping):
        return any(map(_holds_media, feature.values()))
    if isinstance(feature, list):
        return any(map(_holds_media, feature))
    return isinstance(feature, Audio | Image | Video) or _holds_media(getattr(feature, "feature", []))


def _is_media(value: Any) -> bool:
    """Whether a value in a column of any name is an image, a video or a sound."""
    if isinstance(value, list | tuple):
        return any(map(_is_media, value[:1]))
    is_undecoded = isinstance(value, Mapping) and {"bytes", "path"} <= set(value)
    return is_undecoded or type(value).__module__.partition(".")[0] in ("PIL", "torchcodec")


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(one is None or isinstance(one, str) for one in value)
    return value is None or isinstance(value, str | int | float)
