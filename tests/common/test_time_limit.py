"""A process that computes rewards for too long ends; a process alone continues. See also test_failed_ranks."""

import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from trimtab_common import time_limit
from trimtab_common.time_limit import reward_limit


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Makes this process one of two, and returns an event that is set when the limit would end it."""
    event = threading.Event()
    monkeypatch.setattr(time_limit, "world_size", lambda: 2)
    monkeypatch.setattr(time_limit, "_end", lambda _: event.set())
    return event


def timers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer) and thread.is_alive()]


def no_answer() -> None:
    raise ValueError("no answer from the judge")


@pytest.mark.parametrize("block", [lambda: None, no_answer])
def test_rewards_that_come_or_fail_in_time_leave_no_timer(block: Callable[[], None], ended: threading.Event):
    with suppress(ValueError), reward_limit(600):
        (timer,) = timers()
        block()
    timer.join(5)
    assert not timer.is_alive()
    assert not ended.is_set()


def test_rewards_that_take_longer_end_the_process(ended: threading.Event):
    with reward_limit(0.01):
        assert ended.wait(60)


@pytest.mark.parametrize(("seconds", "processes"), [(0, 2), (None, 2), (600, 1)])
def test_there_is_no_limit_where_none_is_set_and_for_a_process_alone(
    seconds: float | None, processes: int, ended: threading.Event, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(time_limit, "world_size", lambda: processes)
    with reward_limit(seconds):
        assert not timers()
