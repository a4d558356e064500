"""Two processes, one of which fails: `case limit`. Each prints the time at which it fails, or what it ends with."""

import ctypes
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from trimtab_common.ranks import begin, phase, watch_ranks
from trimtab_common.stats import gather_over_ranks


def say(**facts: object) -> None:
    print(facts, flush=True)


@phase("rewards")
def rewards(fail: Callable[[], object]) -> None:
    """A reward that fails after a while."""
    time.sleep(0.3)
    say(failed_at=time.monotonic())
    fail()


def no_answer() -> None:
    raise ValueError("no answer\nfrom the judge")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(*, fails: bool, fail: Callable[[], object]) -> None:
    """A step whose rewards fail on one rank, while the other waits in a collective."""
    with phase("training"):
        if fails:
            rewards(fail)
        dist.barrier()


def raises_and_stays(rank: int, limit: float) -> None:
    """Rank 1 catches the error outside of its phases and goes on with something else."""
    try:
        train(fails=rank == 1, fail=no_answer)
    except ValueError:
        time.sleep(4 * limit)


def raises(rank: int, limit: float) -> None:
    train(fails=rank == 1, fail=no_answer)


def is_killed(rank: int, limit: float) -> None:
    train(fails=rank == 1, fail=kill)


def rank_0_is_killed(rank: int, limit: float) -> None:
    train(fails=rank == 0, fail=kill)


def leaves_a_child(rank: int, limit: float) -> None:
    """The child of rank 1 outlives it, with everything that it inherited but gloo's connections."""
    with phase("training"):
        if rank == 1:
            say(failed_at=time.monotonic())
            if os.fork() == 0:
                os.close(1)
                os.close(2)
                time.sleep(3 * limit)
                os._exit(0)
            kill()
        time.sleep(2 * limit)


def raises_between(rank: int, limit: float) -> None:
    """The loop is the caller's, the error is not in a phase, and another thread keeps the process alive."""
    with phase("generation"):
        dist.barrier()
    if rank == 1:
        threading.Thread(target=time.sleep, args=(2 * limit,)).start()
        say(failed_at=time.monotonic())
        no_answer()
    with phase("update"):
        dist.barrier()


def is_slow(rank: int, limit: float) -> None:
    """Rank 1 holds Python's lock, so that no thread of it runs."""
    train(fails=rank == 1, fail=lambda: ctypes.PyDLL(None).sleep(int(2 * limit)))


def all_raise_and_go_on(rank: int, limit: float) -> None:
    for number in range(3):
        try:
            with phase("training"):
                dist.barrier()
                raise ValueError(f"row {number} is too long")
        except ValueError:
            time.sleep(0.2 * rank)
    with phase("training"):
        time.sleep(2 * limit)
    time.sleep(0.5)


def loses_no_time(rank: int, limit: float) -> None:
    """A second trainer begins to watch too; the watch ends with the process group."""
    watch_ranks(limit)
    say(watching=sorted(thread.name for thread in threading.enumerate()))
    dist.barrier()
    dist.destroy_process_group()
    for _ in range(100):
        if threading.active_count() > 1:
            time.sleep(0.2)
    say(after=sorted(thread.name for thread in threading.enumerate()), hook=sys.excepthook is HOOK)
    dist.init_process_group("gloo")
    watch_ranks(limit)
    train(fails=rank == 1, fail=kill)


def one_ends_early(rank: int, limit: float) -> None:
    """Rank 1 has nothing more to do, while rank 0 still writes."""
    if rank == 1:
        sys.exit(0)
    with phase("saving"):
        time.sleep(2 * limit)


def cannot_connect(rank: int, limit: float) -> None:
    """The second process group is served at an address that does not exist."""
    # Over a file: at the same port a process may still meet the first group's store, which is about to close.
    store = f"file://{gather_over_ranks(tempfile.mkdtemp())[0]}/store"
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    os.environ["MASTER_ADDR"] = "nowhere.invalid"
    watch_ranks(limit)
    with phase("training"):
        dist.barrier()


CASES = (
    raises_and_stays,
    raises,
    is_killed,
    rank_0_is_killed,
    leaves_a_child,
    raises_between,
    is_slow,
    all_raise_and_go_on,
    loses_no_time,
    one_ends_early,
    cannot_connect,
)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    HOOK = sys.excepthook
    limit = float(sys.argv[2])
    watch_ranks(limit)
    begin("step 2")
    {case.__name__: case for case in CASES}[sys.argv[1]](dist.get_rank(), limit)
    say(done=True)
