"""A time limit for rewards, which may wait for a service while other processes wait for this one."""

import faulthandler
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from trimtab_common.stats import rank, world_size

REWARD_TIMEOUT = (
    "With several processes, seconds that the rewards of a batch may take in one of them while the others wait; then "
    "it ends, and the launcher ends the others. 0 or None: no limit."
)
"""The help text of the configs' setting `reward_timeout`."""
EXIT_STATUS = 75
"""The status of a process that reached its limit: EX_TEMPFAIL of sysexits.h, for which a retry makes sense."""


@contextmanager
def reward_limit(seconds: float | None) -> Iterator[None]:
    """Ends this process with `EXIT_STATUS` if the block takes longer, and prints the stack of every thread.

    Args:
        seconds: 0 or None, or a process alone: the block takes as long as it takes.
    """
    if not seconds or world_size() == 1:
        yield
        return
    text = f"[rank{rank()}] The rewards took more than {seconds:g} s, which is the limit (reward_timeout)."
    timer = threading.Timer(seconds, _end, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(text: str) -> None:
    print(f"{text} This process ends with status {EXIT_STATUS}, from:", file=sys.stderr, flush=True)
    faulthandler.dump_traceback()
    sys.stdout.flush()
    os._exit(EXIT_STATUS)  # the main thread is in a function of the user, which nothing interrupts
