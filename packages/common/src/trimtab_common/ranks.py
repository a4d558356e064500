"""A process that fails ends the others, and they say which one failed, in which phase and with which error.

The processes of a run wait for one another in collectives. If one of them raises or dies, the others would wait for the
backend's timeout of 10 minutes (NCCL) or 30 (gloo), whose message names nobody. `watch_ranks` connects each process
with rank 0. Over this connection a process tells its phase, and hears of failures.

The kernel closes the connection of a process that dies, and finds out that a machine is gone. A process that is slow,
that holds Python's lock or that is stopped in a debugger keeps its connection, so it does not count as failed. Only
rewards, which may wait for a service, have a limit of their own: a process that is longer in them fails.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import socket
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from types import TracebackType

import torch.distributed as dist

from trimtab_common.relay import Relay, Status, as_connection, receive, send
from trimtab_common.stats import gather_over_ranks, world_size

EXIT_STATUS = 75
"""Of a process that ends because another one failed: EX_TEMPFAIL of sysexits.h, for which a retry makes sense."""
REWARDS = "rewards"
"""The phase that has a limit."""
FAILURE_TIMEOUT = (
    "Seconds within which a process ends after another one has failed. 0 or None: it waits as long as torch does."
)
REWARD_TIMEOUT = (
    "With several processes, seconds that the rewards of a batch may take in one of them while the others wait; then "
    "all end. 0 or None: no limit. Needs rank_failure_timeout."
)
"""What the settings `rank_failure_timeout` and `reward_timeout` of the configs say of themselves."""
TICK = 0.5
"""Seconds between two looks at the clock."""


class RankFailedError(RuntimeError):
    """Another process failed, and this one cannot go on without it. The message names its rank, phase and error."""


def watch_ranks(limit: float | None, reward_limit: float | None = None) -> None:
    """Begins to watch the other processes of the default process group. Collective.

    From then on, a process that is in a phase ends within `limit` seconds after another one has failed: by a
    `RankFailedError` where a collective raises, and by `EXIT_STATUS` where it hangs. A single process watches nobody.
    The watch ends with the process group.

    Args:
        limit: seconds; half of it is for finding out that a machine is gone. A later call changes it. 0 or None: no
            watch begins.
        reward_limit: seconds that a process may be in the phase `REWARDS`; 0 or None: as long as it takes.
    """
    global _watch
    if not limit or world_size() == 1:
        return
    if _watch is None or not _watch.is_of_this_group:
        _watch = _connected(limit)
    if _watch is not None:
        _watch.limit, _watch.reward_limit = limit, reward_limit


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Names what this process does inside the block, or inside the decorated function.

    An exception that leaves the outermost phase is a failure, until the process enters a phase again.

    Raises:
        RankFailedError: another process has ended, so that the outermost phase does not begin; or a collective inside
            it raised because another process failed.
    """
    watch = _watch
    if watch is None or watch.thread != threading.get_ident():
        yield
        return
    outer = watch.enter(name)
    try:
        yield
    except BaseException as error:
        watch.fail(error, outer)
        raise
    watch.leave(name, outer)


def begin(unit: str) -> None:
    """Names the unit of work that the following phases belong to, such as "step 12"."""
    if _watch is not None:
        _watch.unit = unit


def end_in_order() -> None:
    """Tells the other processes that this one ends as all have agreed: what then leaves its phases is no failure."""
    if _watch is not None:
        _watch.end()


class Watch:
    """What this process tells the others, and what it does about their failures.

    Attributes:
        connection: to the relay of rank 0.
        key: the relay's.
        limit, reward_limit: see `watch_ranks`.
        relay: on rank 0 alone.
        thread: the thread whose phases count.
        unit: see `begin`.
        status: of this process.
        failures: by rank, the first one first: the time of `time.monotonic` when it was heard of, and the status.
    """

    def __init__(self, connection: Connection, key: str, limit: float, relay: Relay | None) -> None:
        self.connection, self.key, self.limit, self.relay = connection, key, limit, relay
        self.reward_limit: float | None = None
        self._scoring_since: float | None = None
        self.thread, self.unit = threading.get_ident(), ""
        self.status, self.failures = Status(dist.get_rank()), dict[int, tuple[float, Status]]()
        self._host = Status(0)  # what is known of rank 0
        self._confirmed = self.status  # what the relay has passed on of this process
        self._phase: str | None = None
        self._entered: float | None = time.monotonic()  # the outermost phase; until there is one, start-up
        self._group = weakref.ref(dist.group.WORLD)
        self._is_over, self._news, self._sending = False, threading.Condition(), threading.Lock()
        self._next_hook, sys.excepthook = sys.excepthook, self.uncaught
        atexit.register(self.end)
        send(connection, key, self.status)
        threading.Thread(target=self._listen, name="rank-watch", daemon=True).start()

    @property
    def is_of_this_group(self) -> bool:
        """Whether the process group that is watched is still the default one."""
        return dist.is_initialized() and dist.group.WORLD is self._group()

    # ------------------------------------------------------------ what this process tells

    def enter(self, name: str) -> str | None:
        """Begins a phase; the name of the one around it, None for the outermost."""
        outer = self._phase
        if outer is None:
            for _, failure in tuple(self.failures.values()):
                if failure.state == "ended":
                    raise RankFailedError(self._explained(failure))
            self._entered = time.monotonic()
        self._phase = name
        if name == REWARDS:
            self._scoring_since = time.monotonic()
        self._tell(Status(self.status.rank, self._in_unit(name)))
        return outer

    def leave(self, name: str, outer: str | None) -> None:
        """Ends a phase without an error."""
        self._phase, self._scoring_since = outer, None
        if outer is None:
            self._entered = None
        self._tell(replace(self.status, phase=self._in_unit(outer or f"after {name}")))

    def fail(self, error: BaseException, outer: str | None) -> None:
        """Ends a phase with an error; from the outermost the others hear of it, with the name of the innermost.

        Raises:
            RankFailedError: the error is that of a collective, and another process failed.
        """
        self._phase, self._scoring_since = outer, None
        if outer is not None or self.status.state == "left":
            return
        failure = self._cause_of(error)
        consequence = None if failure is None else RankFailedError(self._explained(failure))
        self._entered = None
        self._tell(replace(self.status, state="failed", error=_in_a_line(consequence or error)))
        self._wait_until_told()
        if consequence is not None:
            raise consequence from error

    def uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Tells the others of an exception that ends this process; a `sys.excepthook`."""
        if self.status.state != "left":
            self._tell(replace(self.status, state="ended", error=_in_a_line(error)))
            self._wait_until_told()
        self._next_hook(kind, error, trace)

    def end(self) -> None:
        """Tells the others that this process ends."""
        self._say_goodbye()
        self._wait_until_told()

    def _say_goodbye(self) -> None:
        if self.status.state != "ended":
            self._tell(replace(self.status, state="ended" if self.status.is_failure else "left"))

    def _tell(self, status: Status) -> None:
        """Changes the status and sends it."""
        if status != self.status and not self._is_over:
            self.status = status
            with self._sending:
                send(self.connection, self.key, status)

    def _wait_until_told(self) -> None:
        """Waits until the relay has told the others, which this process may not outlive."""
        with self._news:
            self._news.wait_for(lambda: self._is_over or self._confirmed == self.status, timeout=1)

    def _in_unit(self, name: str) -> str:
        return f"{name}, {self.unit}" if self.unit else name

    def _cause_of(self, error: BaseException) -> Status | None:
        """The failure of another process that an error of a collective comes from; word of it may still be coming."""
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            with self._news:
                self._news.wait_for(lambda: self.failures or self._is_over, timeout=min(self.limit / 2, 5))
                return self._first
        return None

    # ------------------------------------------------------------- what the others tell

    @property
    def _first(self) -> Status | None:
        return next((status for _, status in self.failures.values()), None)

    def _listen(self) -> None:
        """The thread: hears of the others, and ends this process if a failure keeps it waiting."""
        try:
            while self.is_of_this_group:
                if self.connection.poll(TICK):
                    self._hear(receive(self.connection, self.key))
                self._end_if_overdue()
                self._end_if_slow()
            self._say_goodbye()
            self._hear_until_told()
        except OSError:
            self._hear(self._host.killed())
            while self.failures and self.is_of_this_group:
                time.sleep(TICK)
                self._end_if_overdue()
        self.close()

    def _hear_until_told(self) -> None:
        while self._confirmed != self.status and self.connection.poll(TICK):
            self._hear(receive(self.connection, self.key))

    def _hear(self, status: Status) -> None:
        with self._news:
            if status.rank == 0:
                self._host = status
            if status.rank == self.status.rank:
                self._confirmed = status
            elif not status.is_failure:
                self.failures.pop(status.rank, None)
            else:
                heard, _ = self.failures.get(status.rank, (time.monotonic(), status))
                self.failures[status.rank] = heard, status
                if status.state == "ended" and status == self._first and self._entered is not None:
                    self._print(self._explained(status))  # at once: the launcher may kill this process next
            self._news.notify_all()

    def _end_if_overdue(self) -> None:
        entered = self._entered
        if entered is None or not self.failures:
            return
        heard, failure = next(iter(self.failures.values()))
        waited = time.monotonic() - max(heard, entered)
        if waited > self.limit / 2:
            self._print(f"{self._explained(failure)} It waited {waited:.0f} s and ends with status {EXIT_STATUS}.")
            sys.stdout.flush()
            os._exit(EXIT_STATUS)  # nothing interrupts the main thread, which is in a collective

    def _end_if_slow(self) -> None:
        since = self._scoring_since
        if since is None or not self.reward_limit or time.monotonic() - since <= self.reward_limit:
            return
        error = f"the rewards took more than {self.reward_limit:g} s, which is the limit (reward_timeout)"
        self._tell(replace(self.status, state="ended", error=error))
        self._print(f"In phase '{self.status.phase}' {error}. This process ends with status {EXIT_STATUS}, from:")
        faulthandler.dump_traceback()
        self._hear_until_told()
        sys.stdout.flush()
        os._exit(EXIT_STATUS)  # the main thread is in a function of the user

    def _explained(self, failure: Status) -> str:
        alone = " No later failure is known, because rank 0 passes them on." if failure.rank == 0 else ""
        return (
            f"Rank {failure.rank} failed in phase '{failure.phase}': {failure.error.rstrip('.')}. This process, rank "
            f"{self.status.rank} in phase '{self.status.phase}', cannot go on without it.{alone}"
        )

    def _print(self, text: str) -> None:
        print(f"[rank{self.status.rank}] {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the watch: nobody is told, and nobody heard."""
        self._is_over = True
        self.connection.close()
        atexit.unregister(self.end)
        if sys.excepthook == self.uncaught:
            sys.excepthook = self._next_hook


_watch: Watch | None = None
"""Of the default process group, of which a process has one."""


def _connected(limit: float) -> Watch | None:
    """The watch of this process; None on all if one of them does not reach rank 0, with a warning. Collective."""
    rank = dist.get_rank()
    relay = Relay(world_size(), limit) if rank == 0 else None
    host, port, key = gather_over_ranks((*relay.address, relay.key) if relay else ("", 0, ""))[0]
    connection, problem = None, ""
    try:
        connection = as_connection(socket.create_connection((host, port), timeout=min(limit / 2, 10)), limit)
    except OSError as error:
        problem = f"rank {rank}: {error}"
    problems = [text for text in gather_over_ranks(problem) if text]
    if connection is None or problems:
        if relay is not None:
            relay.listener.close()
            warnings.warn(
                f"Not every process reaches rank 0 at {host}, port {port} ({'; '.join(problems[:4])}): none of them "
                "will notice that another one failed. Open the ports between the machines, or set "
                "rank_failure_timeout=None.",
                stacklevel=3,
            )
        return None
    if relay is not None:
        relay.start()
    return Watch(connection, key, limit, relay)


def _in_a_line(error: BaseException) -> str:
    """The type and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:500]}" if lines else type(error).__name__


def _forget() -> None:
    """In a forked process: drops connections that else would outlive the process that they belong to."""
    global _watch
    if _watch is not None:
        _watch.close()
        if _watch.relay is not None:
            _watch.relay.listener.close()
            for member in _watch.relay.members:
                member.close()
        _watch = None


os.register_at_fork(after_in_child=_forget)
