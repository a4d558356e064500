"""A call of a reward function or environment: arguments, names in errors, and a loop for async ones."""

import asyncio
import inspect
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

from trimtab_common.reward_checks import RewardError

T = TypeVar("T")


def is_async(function: Callable[..., object]) -> bool:
    """Whether a call of the function returns something to await."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def accepted(function: Callable[..., object], what: str, arguments: Mapping[str, object]) -> dict[str, object]:
    """Select the arguments that the signature of a function takes.

    Args:
        what: the function, as the error begins.
        arguments: all that there are, by name.

    Returns:
        The arguments to call it with; all arguments if it takes `**kwargs`.

    Raises:
        RewardError: the function needs an argument that there is not.
    """
    parameters = inspect.signature(function).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variable]
    if missing := [argument for argument in needed if argument not in arguments]:
        raise RewardError(
            f"{what} needs {missing}; there are {sorted(arguments)} (the dataset's columns among "
            "them). Rename its arguments, give them defaults, or add the columns to the dataset."
        )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(arguments)
    taken = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {argument: value for argument, value in arguments.items() if argument in taken}


class EventLoop:
    """An asyncio loop in a separate thread.

    It works where another loop runs already, as in notebooks, and it outlives a call.
    """

    def __init__(self) -> None:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="event loop", daemon=True).start()
        self._loop = loop
        weakref.finalize(self, loop.call_soon_threadsafe, loop.stop)

    def submit(self, awaitable: Awaitable[T]) -> Future[T]:
        """Start an awaitable on the loop, and return its future."""
        return asyncio.run_coroutine_threadsafe(_await(awaitable), self._loop)


async def _await(awaitable: Awaitable[T]) -> T:
    return await awaitable
