"""Many environments at once: plain functions in threads, async ones on an event loop, each within a time limit."""

import asyncio
import inspect
import threading
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, ParamSpec, TypeVar

from trimtab_lm.rewards.calls import EventLoop, accepted, is_async

from .protocol import Environment, Reply, checked, error_text

P = ParamSpec("P")
T = TypeVar("T")


async def call(function: Callable[P, Awaitable[T] | T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a function, plain or async, while the event loop goes on.

    A plain function runs in a daemon thread, which does not keep the process alive if it never returns.
    """
    if is_async(function):
        result = function(*args, **kwargs)
    else:
        outcome: Future[Awaitable[T] | T] = Future()
        outcome.set_running_or_notify_cancel()  # from here on the caller may stop waiting, but cannot cancel

        def run() -> None:
            try:
                outcome.set_result(function(*args, **kwargs))
            except (SystemExit, StopIteration) as error:  # the loop would stop, or never hear of it
                outcome.set_exception(RuntimeError(repr(error)))
            except Exception as error:
                outcome.set_exception(error)

        threading.Thread(target=run, name="environment", daemon=True).start()
        result = await asyncio.wrap_future(outcome)
    return await result if inspect.isawaitable(result) else result


class Slot(NamedTuple):
    """An environment, and a lock that a call of its plain methods holds until it returns."""

    environment: Environment
    lock: threading.Lock


class EnvironmentPool:
    """Environments that are reset for each episode and used again.

    Args:
        time_limit: seconds for a step, and for a reset.
        concurrency: calls at a time.
    """

    def __init__(self, make_environment: Callable[[], Environment], *, time_limit: float, concurrency: int):
        if concurrency < 1 or time_limit <= 0:
            raise ValueError(f"concurrency={concurrency}, time_limit={time_limit}: both are above 0.")
        self.make_environment, self.time_limit = make_environment, time_limit
        self._slots: list[Slot] = []
        self._loop, self._room = EventLoop(), asyncio.Semaphore(concurrency)
        self._has_warned = False

    def reset(self, episodes: Sequence[Mapping[str, object]]) -> list[Slot]:
        """An environment for each episode, which has begun it.

        Args:
            episodes: for each, the arguments that `reset` may take.
        """
        # A call that took too long may still be going on: its environment is given up.
        self._slots = [slot for slot in self._slots if not slot.lock.locked()]
        self._slots += [Slot(self.make_environment(), threading.Lock()) for _ in episodes[len(self._slots) :]]
        slots = self._slots[: len(episodes)]
        self._run([self._reset(*pair) for pair in zip(slots, episodes, strict=True)])
        return slots

    def step(self, turns: Sequence[tuple[Slot, str, list[int]]]) -> list[Reply]:
        """The replies to turns of the policy, in their order. Warns of the first step that fails.

        Args:
            turns: for each the environment that replies, the text and its tokens.
        """
        calls = [self._call(slot, slot.environment.step, text, ids) for slot, text, ids in turns]
        replies = []
        for (slot, *_), result in zip(turns, self._run(calls, return_exceptions=True), strict=True):
            if isinstance(result, Exception):
                self._warn(slot, result)
                result = Reply(error_text(result), errors=1)
            replies.append(checked(result, slot.environment))
        return replies

    async def _reset(self, slot: Slot, columns: Mapping[str, object]) -> None:
        reset = slot.environment.reset
        name = f"{type(slot.environment).__name__}.reset"
        try:
            await self._call(slot, reset, **accepted(reset, name, columns))
        except Exception as error:
            error.add_note(f"Raised by {name}; the episode's columns are {columns}.")
            raise

    async def _call(self, slot: Slot, function: Callable[..., object], *args: object, **kwargs: object) -> object:
        def alone() -> object:
            with slot.lock:
                return function(*args, **kwargs)

        async with self._room:
            try:
                async with asyncio.timeout(self.time_limit) as clock:
                    return await (call(function, *args, **kwargs) if is_async(function) else call(alone))
            except TimeoutError:
                if not clock.expired():
                    raise
                raise TimeoutError(f"no answer within {self.time_limit:g} seconds") from None

    def _run(self, calls: Sequence[Coroutine[Any, Any, T]], *, return_exceptions: bool = False) -> list[Any]:
        async def together() -> list[Any]:
            return await asyncio.gather(*calls, return_exceptions=return_exceptions)

        return self._loop.submit(together()).result()

    def _warn(self, slot: Slot, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{type(slot.environment).__name__}.step failed, and the policy reads {error_text(error)!r}. The "
                "statistic environment/errors counts such steps; there is no further warning.",
                stacklevel=4,
            )
