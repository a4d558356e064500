"""Environments that run at once, fail, hang, or return something other than a reply."""

import asyncio
import sys
import threading
import time
import warnings

import pytest

from trimtab_lm.environments import Reply
from trimtab_lm.environments.pool import EnvironmentPool


class Plain:
    """Does in each step what it is told to."""

    def reset(self):
        self.steps = 0

    def step(self, text, ids):
        self.steps += 1
        return ACTIONS[text](self)


class Async(Plain):
    async def reset(self):
        self.steps = 0

    async def step(self, text, ids):
        self.steps += 1
        return ACTIONS[text](self)


def fails(environment):
    raise ValueError("no such file")


def hangs(environment):
    time.sleep(1.5)
    return Reply("late")


ACTIONS = {
    "fine": lambda environment: Reply(f"step {environment.steps}", reward=0.5),
    "fails": fails,
    "exits": lambda environment: sys.exit(3),
    "exhausts": lambda environment: next(iter(())),
    "hangs": hangs,
    "times out": lambda environment: (_ for _ in ()).throw(TimeoutError("the socket")),
}


def pool(environment=Plain, time_limit=10.0, concurrency=64):
    return EnvironmentPool(environment, time_limit=time_limit, concurrency=concurrency)


def replies(environments, *texts):
    slots = environments.reset([{}] * len(texts))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*step failed")
        return environments.step([(slot, text, [5]) for slot, text in zip(slots, texts, strict=True)])


@pytest.mark.parametrize("environment", [Plain, Async])
def test_replies_come_in_order_and_a_failure_is_an_observation(environment):
    fine, failed, fine_too = replies(pool(environment), "fine", "fails", "fine")
    assert fine == fine_too == Reply("step 1", reward=0.5)
    assert failed == Reply("Error: ValueError: no such file", errors=1)


def test_what_would_end_a_thread_or_a_loop_is_an_observation():
    exited, exhausted, fine = replies(pool(), "exits", "exhausts", "fine")
    assert exited.observation == "Error: RuntimeError: SystemExit(3)"
    assert exhausted.observation == "Error: RuntimeError: StopIteration()"
    assert fine.errors == 0


def test_environments_step_at_once():
    """Each of twenty waits for the others."""
    meeting = threading.Barrier(20, timeout=30)

    class Meets(Plain):
        def step(self, text, ids):
            meeting.wait()
            return Reply("met")

    assert replies(pool(Meets, time_limit=60), *["x"] * 20) == [Reply("met")] * 20


def test_async_environments_step_at_once():
    came = []

    class Meets(Async):
        async def step(self, text, ids):
            came.append(text)
            while len(came) < 20:
                await asyncio.sleep(0.01)
            return Reply("met")

    assert replies(pool(Meets, time_limit=30), *["x"] * 20) == [Reply("met")] * 20


def test_concurrency_bounds_how_many_run():
    running, most = [], []

    class Counting(Plain):
        def step(self, text, ids):
            running.append(1)
            most.append(len(running))
            time.sleep(0.02)
            running.pop()
            return Reply()

    replies(pool(Counting, concurrency=3), *["fine"] * 12)
    assert max(most) == 3


def test_a_slow_step_is_an_observation_and_its_environment_is_given_up():
    environments = pool(time_limit=0.3)
    slow, fine = replies(environments, "hangs", "fine")
    assert slow == Reply("Error: TimeoutError: no answer within 0.3 seconds", errors=1)
    assert fine.errors == 0
    before = [slot.environment for slot in environments.reset([{}, {}])]
    assert [type(one) for one in before] == [Plain, Plain]
    assert before[0].steps == before[1].steps == 0  # one is new, the other was reset
    assert replies(pool(), "times out")[0].observation == "Error: TimeoutError: the socket"


def test_a_slow_async_step_is_cancelled():
    class Patient(Plain):
        async def step(self, text, ids):
            await asyncio.sleep(60)

    assert replies(pool(Patient, time_limit=0.1), "fine")[0].errors == 1


def test_no_environment_is_called_twice_at_a_time():
    inside, most = [], []

    class Watched(Plain):
        def step(self, text, ids):
            inside.append(text)
            most.append(len(inside))
            time.sleep(0.4)
            inside.pop()
            return Reply("done")

    environments = pool(Watched, time_limit=0.3)
    (slot,) = environments.reset([{}])
    with pytest.warns(UserWarning, match="Watched.step failed"):
        assert environments.step([(slot, "x", [])])[0].errors == 1
    assert environments.step([(slot, "x", [])])[0].errors == 1  # waits for the first, and too little time is left
    time.sleep(0.5)
    assert most == [1, 1]


def test_only_the_first_failure_is_a_warning():
    environments = pool()
    slots = environments.reset([{}, {}])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        environments.step([(slot, "fails", []) for slot in slots])
        environments.step([(slots[0], "fails", [])])
    (warning,) = seen
    assert "Plain.step failed, and the policy reads 'Error: ValueError: no such file'" in str(warning.message)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"Plain.step returned None \(NoneType\), and a Reply is needed"),
        (("text", 1.0, False), "and a Reply is needed"),
        (Reply(5), "the observation 5 "),
        (Reply([1, "a"]), "a text, a list of messages or a list of token ids"),
        (Reply([{"role": "tool"}, 3]), "a text, a list of messages or a list of token ids"),
        (Reply("a", reward=float("nan")), "the reward nan, and a finite int or float"),
        (Reply("a", reward="much"), "the reward 'much'"),
    ],
)
def test_a_step_that_returns_no_reply_is_an_error_of_the_program(monkeypatch, value, message):
    monkeypatch.setitem(ACTIONS, "odd", lambda environment: value)
    with pytest.raises((TypeError, ValueError), match=message):
        replies(pool(), "odd")


def test_a_reset_that_fails_names_environment_and_columns():
    class Broken(Plain):
        def reset(self, task):
            raise OSError("no sandbox")

    with pytest.raises(OSError, match="no sandbox") as raised:
        pool(Broken).reset([{"task": 3}])
    assert raised.value.__notes__ == ["Raised by Broken.reset; the episode's columns are {'task': 3}."]
