"""A process that fails ends the others soon, and they say which one it was and what it did."""

import ast
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from tests.common import run_ranks
from tests.processes import ROOT, Ended, ends_of_two

from trimtab_common.ranks import EXIT_STATUS, phase, watch_ranks
from trimtab_common.relay import Relay, Status, as_connection, receive, send

LIMIT = 4
BUSY = 30  # seconds that a busy machine may take longer; without the watch the others would wait for 30 minutes
MODULE = "tests.common.run_ranks"
REWARDS = "phase 'rewards, step 2'"
KILLED = f"failed in {REWARDS}: its process was killed or crashed"


def run(case: Callable[[int, float], None], limit: float = LIMIT) -> list[Ended]:
    return ends_of_two(MODULE, case.__name__, str(limit))


def facts(end: Ended) -> dict[str, object]:
    """What a process printed."""
    return {name: value for line in end.output.splitlines() for name, value in ast.literal_eval(line).items()}


def seconds_after(failed: Ended, survivor: Ended) -> float:
    """From the failure of one process to the end of the other. Monotonic time is that of the machine."""
    return survivor.time - float(str(facts(failed)["failed_at"]))


@pytest.mark.distributed
def test_a_process_that_waits_in_vain_ends_within_the_limit():
    """Before the process that failed, which stays for four times the limit."""
    survivor, failed = run(run_ranks.raises_and_stays, limit=2)
    assert survivor.status == EXIT_STATUS
    assert f"Rank 1 failed in {REWARDS}: ValueError: no answer." in survivor.errors
    assert "rank 0 in phase 'training, step 2'" in survivor.errors
    assert survivor.time < failed.time


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "victim", "text"),
    [
        (run_ranks.raises, 1, f"Rank 1 failed in {REWARDS}: ValueError: no answer."),
        (run_ranks.is_killed, 1, f"Rank 1 {KILLED}"),
        (run_ranks.rank_0_is_killed, 0, f"Rank 0 {KILLED}"),
        (run_ranks.rank_0_is_killed, 0, "No later failure is known, because rank 0 passes them on."),
        (run_ranks.raises_between, 1, "Rank 1 failed in phase 'after generation, step 2': ValueError: no answer."),
        (run_ranks.leaves_a_child, 1, "Rank 1 failed in phase 'training, step 2': its process was killed or crashed"),
    ],
)
def test_the_survivor_says_who_failed_and_how(case, victim: int, text: str):
    ends = run(case)
    failed, survivor = ends[victim], ends[1 - victim]
    assert survivor.status in (1, EXIT_STATUS)
    assert text in survivor.errors
    assert f"This process, rank {1 - victim}" in survivor.errors
    assert seconds_after(failed, survivor) < LIMIT + BUSY


@pytest.mark.slow
@pytest.mark.parametrize("case", [run_ranks.raises, run_ranks.is_killed])
def test_an_error_of_the_backend_names_the_process_that_caused_it(case):
    survivor = run(case, limit=60)[0]
    last = survivor.errors.strip().splitlines()[-1]
    assert "trimtab_common.ranks.RankFailedError: Rank 1" in last
    assert "The above exception was the direct cause" in survivor.errors
    assert "gloo" in survivor.errors


@pytest.mark.slow
@pytest.mark.parametrize("case", [run_ranks.is_slow, run_ranks.all_raise_and_go_on, run_ranks.one_ends_early])
def test_a_process_that_is_slow_or_goes_on_or_has_finished_is_no_failure(case):
    for end in run(case, limit=2):
        assert (end.status, "Rank" in end.errors) == (0, False), end.errors


@pytest.mark.slow
def test_a_watch_ends_with_its_process_group_and_another_begins_with_the_next():
    survivor, failed = run(run_ranks.loses_no_time)
    assert facts(survivor)["watching"] == ["MainThread", "rank-relay", "rank-watch"]
    assert facts(failed)["watching"] == ["MainThread", "rank-watch"]
    for end in (survivor, failed):
        assert facts(end)["after"] == ["MainThread"]
        assert facts(end)["hook"] is True
    assert "Rank 1 failed in phase 'rewards': its process was killed" in survivor.errors


@pytest.mark.slow
@pytest.mark.parametrize("case", [run_ranks.raises, run_ranks.is_killed])
def test_the_message_comes_before_torchrun_ends_the_process(case):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", MODULE]
    done = subprocess.run([*launcher, case.__name__, "60"], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert f"[rank0] Rank 1 failed in {REWARDS}" in done.stderr


@pytest.mark.slow
def test_a_run_goes_on_unwatched_where_processes_do_not_reach_rank_0():
    first, second = run(run_ranks.cannot_connect)
    assert (first.status, second.status) == (0, 0)
    assert "Not every process reaches rank 0 at nowhere.invalid" in first.errors
    assert "rank_failure_timeout=None" in first.errors
    assert "nowhere.invalid" not in second.errors


def test_a_process_alone_watches_nobody():
    before = threading.enumerate()
    watch_ranks(60)
    with phase("training"):
        assert threading.enumerate() == before


# ------------------------------------------------------------------ the relay, without a process group


@pytest.fixture
def relay() -> Relay:
    thread = Relay(size=3, limit=LIMIT)
    thread.start()
    return thread


def joined(relay: Relay, rank: int, key: str | None = None) -> Connection:
    """The connection of a process that has said that it is there."""
    port = relay.listener.getsockname()[1]
    connection = as_connection(socket.create_connection(("localhost", port), timeout=LIMIT), LIMIT)
    send(connection, key or relay.key, Status(rank))
    return connection


def heard(connection: Connection, relay: Relay, count: int) -> list[Status]:
    """The next messages of the relay; there are no more."""
    messages = []
    while connection.poll(BUSY if len(messages) < count else 0.2):
        messages.append(receive(connection, relay.key))
    return messages


def test_failures_and_the_phases_of_rank_0_are_passed_on(relay: Relay):
    members = [joined(relay, rank) for rank in range(3)]
    for member in members:
        heard(member, relay, 1)
    told = [
        Status(1, "generation"),
        Status(0, "update"),
        Status(1, "generation", "failed", "ValueError: no"),
        Status(1, "generation"),
    ]
    for status in told[:2]:  # of two processes, whose messages may come in any order
        send(members[status.rank], relay.key, status)
    assert [heard(member, relay, 1) for member in members] == [told[1:2]] * 3
    for status in told[2:]:
        send(members[status.rank], relay.key, status)
    assert [heard(member, relay, 2) for member in members] == [told[2:]] * 3


def test_a_connection_that_breaks_is_a_dead_process_unless_it_said_goodbye(relay: Relay):
    members = [joined(relay, rank) for rank in range(3)]
    heard(members[0], relay, 1)
    send(members[1], relay.key, Status(1, "saving", "left"))
    members[1].close()
    send(members[2], relay.key, Status(2, "generation"))
    members[2].close()
    left, killed = heard(members[0], relay, 2)
    assert left == Status(1, "saving", "left")
    assert (killed.rank, killed.phase, killed.state) == (2, "generation", "ended")


def test_a_process_that_joins_late_hears_what_the_others_were_told(relay: Relay):
    first, second = joined(relay, 0), joined(relay, 1)
    failure = Status(1, "start-up", "failed", "OSError: disk full")
    send(second, relay.key, failure)
    assert heard(first, relay, 2) == [Status(0), failure]
    assert heard(joined(relay, 2), relay, 2) == [Status(0), failure]


def test_a_stranger_is_not_heard(relay: Relay):
    member = joined(relay, 0)
    assert heard(member, relay, 1) == [Status(0)]
    stranger = joined(relay, 1, key="another")
    garbage = joined(relay, 2, key="another")
    garbage.send_bytes(b"GET / HTTP/1.1")
    assert heard(member, relay, 0) == []
    with pytest.raises(OSError, match=re.escape("ended")):
        receive(stranger, relay.key)


def test_the_relay_ends_when_all_have_gone(relay: Relay):
    members = [joined(relay, rank) for rank in range(3)]
    for member in members:
        member.close()
    relay.join(timeout=BUSY)
    assert not relay.is_alive()


def test_every_case_is_run():
    source = Path(__file__).read_text()
    assert all(f"run_ranks.{case.__name__}" in source for case in run_ranks.CASES)
