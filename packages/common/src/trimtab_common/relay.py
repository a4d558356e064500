"""Messages between the processes of a run over TCP: each tells rank 0 its status, and rank 0 passes failures on."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from selectors import EVENT_READ, DefaultSelector
from typing import Literal

KILLED = "its process was killed or crashed, perhaps for lack of memory"
LONGEST = 2**16
"""Bytes of a message."""


@dataclass(frozen=True)
class Status:
    """What a process says of itself.

    Attributes:
        rank: of the process.
        phase: what it does, such as "rewards, step 2".
        state: "failed" after an exception has left a phase, until the process enters another; "ended" after an
            exception that nothing caught, and for a process that died; "left" after an orderly end.
        error: type and first line of the exception.
    """

    rank: int
    phase: str = "start-up"
    state: Literal["running", "failed", "ended", "left"] = "running"
    error: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether the other processes cannot go on."""
        return self.state in ("failed", "ended")

    def killed(self) -> Status:
        """The status after the connection broke: that of a dead process, unless it said that it ends."""
        return self if self.state in ("ended", "left") else replace(self, state="ended", error=self.error or KILLED)


class Relay(threading.Thread):
    """The thread of rank 0 that hears all processes, its own too, and passes on what concerns the others.

    Those are failures and orderly ends, and each phase of rank 0, because nobody passes on in which phase rank 0 died.

    Args:
        size: number of processes.
        limit: see `as_connection`.

    Attributes:
        key: a process must show it to be heard.
        members: the connections, with the last status that came over each.
    """

    def __init__(self, size: int, limit: float) -> None:
        super().__init__(name="rank-relay", daemon=True)
        self.size, self.limit, self.key = size, limit, secrets.token_hex(16)
        has_both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if has_both else socket.AF_INET
        self.listener = socket.create_server(("", 0), family=family, backlog=size, dualstack_ipv6=has_both)
        self.members: dict[Connection, Status | None] = {}
        self._known: dict[int, Status] = {}
        self._ready = DefaultSelector()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port. Launchers name the machine of rank 0 in MASTER_ADDR."""
        return os.environ.get("MASTER_ADDR", socket.gethostname()), self.listener.getsockname()[1]

    def run(self) -> None:
        """Hears the processes until all have gone."""
        self._ready.register(self.listener, EVENT_READ)
        while self._ready.get_map():
            for key, _ in self._ready.select():
                if isinstance(key.fileobj, Connection):
                    self._hear(key.fileobj)
                elif self.listener.fileno() >= 0:
                    member = as_connection(self.listener.accept()[0], self.limit)
                    self._ready.register(member, EVENT_READ)
                    self.members[member] = None

    def _hear(self, member: Connection) -> None:
        before = self.members[member]
        try:
            status = self.members[member] = receive(member, self.key)
        except OSError:
            del self.members[member]
            self._ready.unregister(member)
            member.close()
            if before is None:  # a stranger
                return
            status = before.killed()
        self._known[status.rank] = status
        is_closed = self.listener.fileno() < 0
        if not is_closed and (len(self._known) == self.size or (status.rank == 0 and status.state != "running")):
            self._ready.unregister(self.listener)
            self.listener.close()
        if before is None:  # may have missed some
            for known in self._known.values():
                if known.rank == 0 or known.is_failure:
                    send(member, self.key, known)
        elif status.state != before.state or status.rank == 0:
            for each in sorted(self.members, key=lambda each: each is member):
                send(each, self.key, status)  # the process itself comes last: it waits until the others know


def send(connection: Connection, key: str, status: Status) -> None:
    """Sends a status; nothing if the connection is broken, which its reader notices."""
    with suppress(OSError):
        connection.send_bytes(json.dumps([key, vars(status)]).encode())


def receive(connection: Connection, key: str) -> Status:
    """The next status.

    Raises:
        OSError: the connection is broken, or the other side has another key.
    """
    try:
        shown, values = json.loads(connection.recv_bytes(LONGEST))
        if shown == key:
            return Status(**values)
    except (EOFError, ValueError, TypeError) as error:
        raise ConnectionError("the connection ended, or what came is no status") from error
    raise ConnectionError("the other side has another key")


def as_connection(connected: socket.socket, limit: float) -> Connection:
    """A connection that the kernel gives up after the other machine was silent for half of `limit` seconds."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(limit / 4)))
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(limit / 8)))
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(500 * limit))  # milliseconds
    return Connection(connected.detach())
