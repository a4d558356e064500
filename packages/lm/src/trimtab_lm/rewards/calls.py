"""A call of a reward function: its arguments, its name in errors, its result as numbers, and a loop for async ones."""

import asyncio
import inspect
import math
import numbers
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from torch import Tensor

T = TypeVar("T")


def is_async(function: Callable[..., object]) -> bool:
    """Whether a call of the function returns something to await."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def accepted(function: Callable[..., object], name: str, arguments: Mapping[str, object]) -> dict[str, object]:
    """Select the arguments that the signature of a reward function takes.

    Args:
        function: the reward function.
        name: of the function, for the error.
        arguments: all that there are, by name.

    Returns:
        The arguments to call it with; all of them if it takes `**kwargs`.

    Raises:
        TypeError: the function needs an argument that there is not.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(arguments)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    if missing := [argument for argument in needed if argument not in arguments]:
        raise TypeError(
            f"The reward function {name!r} needs {missing}; there are {sorted(arguments)} (the dataset's columns among "
            "them). Rename its arguments, give them defaults, or add the columns to the dataset."
        )
    taken = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {argument: value for argument, value in arguments.items() if argument in taken}


def checked(result: object, name: str, count: int) -> list[float]:
    """The result of a reward function as numbers.

    Args:
        result: what the function returned.
        name: of the function, for the errors.
        count: completions that it was called with.

    Returns:
        `count` finite numbers, NaN where the function returned None.

    Raises:
        TypeError: the result is no list, tuple, tensor or array, or an entry is no number.
        ValueError: there is not one entry per completion, or an entry is not finite.
    """
    values = result.tolist() if isinstance(result, Tensor | np.ndarray) else result
    if not isinstance(values, list | tuple):
        raise TypeError(
            f"The reward function {name!r} returned a {type(result).__name__}: a list of {count} numbers is needed, "
            "one per completion (None where it does not apply)."
        )
    if len(values) != count:
        raise ValueError(
            f"The reward function {name!r} returned {len(values)} scores for {count} completions: one for each is "
            "needed, None where it does not apply."
        )
    return [_number(value, name, i) for i, value in enumerate(values)]


def _number(value: object, name: str, i: int) -> float:
    if value is None:
        return math.nan
    if isinstance(value, Tensor | np.generic | np.ndarray) and math.prod(value.shape) == 1:
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(
            f"The reward function {name!r} returned {value!r} ({type(value).__name__}) for completion {i}: a number is "
            "needed, or None where it does not apply."
        )
    if not math.isfinite(value):
        raise ValueError(
            f"The reward function {name!r} returned {value} for completion {i}: scores are finite. Return None where "
            "it does not apply."
        )
    return float(value)


class EventLoop:
    """An asyncio loop in a thread of its own.

    It works where another loop runs already, as in notebooks, and it outlives a call.
    """

    def __init__(self) -> None:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="reward functions", daemon=True).start()
        self._loop = loop
        weakref.finalize(self, loop.call_soon_threadsafe, loop.stop)

    def submit(self, awaitable: Awaitable[T]) -> Future[T]:
        """Start an awaitable on the loop, and return its future."""
        return asyncio.run_coroutine_threadsafe(_await(awaitable), self._loop)


async def _await(awaitable: Awaitable[T]) -> T:
    return await awaitable


@contextmanager
def blaming(name: str) -> Iterator[None]:
    """Add the name of a reward function to what is raised inside the block."""
    try:
        yield
    except Exception as error:
        error.add_note(f"Raised in the reward function {name!r}.")
        raise
