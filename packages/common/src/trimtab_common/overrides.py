"""Finds replaced methods of a trainer, and calls them."""

import inspect
from collections.abc import Callable
from typing import Any


def replaced(trainer: object, base: type, *names: str) -> list[str]:
    """Returns the names of methods of `base` that a subclass, or an assignment to the trainer, replaces."""
    kind = type(trainer)
    return [name for name in names if name in vars(trainer) or getattr(kind, name) is not getattr(base, name)]


def source_of(trainer: object, base: type, *names: str) -> str | None:
    """Returns the source code of replaced methods, "" if there are none; None if Python cannot find the source."""
    try:
        return "".join(inspect.getsource(getattr(trainer, name)) for name in replaced(trainer, base, *names))
    except (OSError, TypeError):
        return None


def call_with_known(method: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls a method with the options that it has parameters for."""
    parameters = inspect.signature(method).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return method(*args, **{name: value for name, value in options.items() if takes_all or name in parameters})
