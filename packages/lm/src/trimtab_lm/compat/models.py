"""What engines ask a model of transformers, read on 5.24."""

from collections.abc import Iterable
from typing import Any


def undivided(model: Any) -> Iterable[str] | None:
    """The classes of a model's modules that engines shard as units: its blocks. None where the model names none.

    A release without the name raises AttributeError.
    """
    names: Iterable[str] | None = model._no_split_modules
    return names
