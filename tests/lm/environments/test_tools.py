"""Tools that the policy calls: the format, the results, and every kind of wrong call."""

import asyncio
import json
import math
import threading

import pytest

from trimtab_lm.environments import Reply, ToolEnvironment
from trimtab_lm.environments.tools import Call, json_calls


def root(x: float) -> float:
    return math.sqrt(x)


async def later(text: str, times: int = 2) -> str:
    await asyncio.sleep(0.01)
    return text * times


def written(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def reply(text, **options):
    environment = ToolEnvironment([root, later], **options)
    environment.reset()
    return asyncio.run(environment.step(text, []))


def test_calls_are_read_where_they_stand():
    text = f"I think{written('root', x=2)} and {written('later', text='a', times=3)}"
    assert json_calls(text) == [Call("root", {"x": 2}), Call("later", {"text": "a", "times": 3})]
    assert json_calls('<tool_call>{"name": "root"}') == [Call("root", {})]  # cut off at the end
    assert json_calls("four") == []


def test_a_turn_without_a_call_ends_the_episode():
    assert reply("It is 4.") == Reply(done=True)


def test_plain_and_async_tools_give_their_results_one_per_line():
    assert reply(written("root", x=9) + written("later", text="ab")) == Reply("3.0\nabab")


def test_the_tools_of_a_turn_run_at_once():
    """Each of ten calls waits for the other nine."""
    meeting = threading.Barrier(10, timeout=30)

    def meet() -> str:
        meeting.wait()
        return "met"

    result = asyncio.run(ToolEnvironment([meet]).step(written("meet") * 10, []))
    assert result.observation == "\n".join(["met"] * 10)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (written("cube", x=2), "Error: LookupError: there is no tool 'cube'; there are root, later"),
        (written("root", y=2), "Error: TypeError: missing a required argument: 'x'"),
        (written("root", x=2, y=2), "Error: TypeError: got an unexpected keyword argument 'y'"),
        (written("root", x=-1), "Error: ValueError: math domain error"),
        (written("root", x="two"), "Error: TypeError: must be real number, not str"),
        ("<tool_call>root(2)</tool_call>", "Error: JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
        ("<tool_call>[]</tool_call>", 'Error: ValueError: a call is {"name": ..., "arguments": {...}}'),
        (
            '<tool_call>{"name": "root", "arguments": 2}</tool_call>',
            'Error: ValueError: "arguments" is an object with a value for each argument',
        ),
    ],
)
def test_a_wrong_call_is_an_error_that_the_policy_reads(text, error):
    assert reply(text) == Reply(error, errors=1)


def test_one_wrong_call_leaves_the_other_result():
    answer = reply(written("root", x=4) + written("cube"))
    assert answer == Reply("2.0\nError: LookupError: there is no tool 'cube'; there are root, later", errors=1)


def test_long_results_are_cut_and_other_formats_can_be_parsed():
    assert reply(written("later", text="abc", times=9), max_characters=5).observation == "abcab"
    assert reply("root 16", parse=lambda text: [Call("root", {"x": int(text.split()[1])})]).observation == "4.0"
