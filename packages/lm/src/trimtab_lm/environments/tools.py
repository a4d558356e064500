"""An environment of tools: functions that the policy calls by writing JSON."""

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .pool import call
from .protocol import Reply, error_text

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


class Call(NamedTuple):
    """A tool's name and its arguments, by name."""

    name: str
    arguments: dict[str, object]


def json_calls(text: str) -> list[Call]:
    """The calls in a text, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` each.

    The chat templates of Qwen and Hermes describe this format to the model. The end of the text closes a call too.

    Raises:
        ValueError: there is something else between the tags.
    """
    calls = []
    for body in CALL.findall(text):
        value = json.loads(body)  # its error is a ValueError
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise ValueError('a call is {"name": ..., "arguments": {...}}')
        arguments = value.get("arguments", {})
        if not isinstance(arguments, dict):
            raise ValueError('"arguments" is an object with a value for each argument')
        calls.append(Call(value["name"], arguments))
    return calls


class ToolEnvironment:
    """Runs the tools that the policy calls. A turn without a call is its answer, and ends the episode.

    The policy reads the results, one per line. It reads an error where a call cannot be parsed, names an unknown tool,
    has arguments that do not fit, or raises an exception. There is no reward: score the completions with reward
    functions, or override `step`.

    Args:
        tools: functions, plain or async; the policy calls them by name.
        parse: the calls in a text; ValueError where they are malformed.
        max_characters: the most characters of each result; the rest is cut off.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., object]],
        *,
        parse: Callable[[str], list[Call]] = json_calls,
        max_characters: int = 2000,
    ):
        self.tools = {tool.__name__: tool for tool in tools}
        self.parse, self.max_characters = parse, max_characters

    def reset(self) -> None:
        """Does nothing: tools have no state."""

    async def step(self, text: str, ids: list[int]) -> Reply:
        """The results of the calls in a turn; the calls of a turn run at once."""
        try:
            calls = self.parse(text)
        except ValueError as error:
            return Reply(error_text(error), errors=1)
        if not calls:
            return Reply(done=True)
        results = await asyncio.gather(*(self._run(*one) for one in calls), return_exceptions=True)
        errors = [result for result in results if isinstance(result, Exception)]
        lines = [error_text(result) if isinstance(result, Exception) else str(result) for result in results]
        return Reply("\n".join(line[: self.max_characters] for line in lines), errors=len(errors))

    async def _run(self, name: str, arguments: dict[str, object]) -> object:
        if name not in self.tools:
            raise LookupError(f"there is no tool {name!r}; there are {', '.join(self.tools)}")
        tool = self.tools[name]
        inspect.signature(tool).bind(**arguments)  # its TypeError names the argument
        return await call(tool, **arguments)
