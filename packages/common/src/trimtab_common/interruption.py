"""SIGTERM and SIGINT end a training process after its step, once the run is saved and its tracker is closed.

A trainer whose steps take long calls `end_if_asked` within them, too, and saves what it needs to finish the step.

The first signal is noted. All processes of the run agree on it at the end of a step, so that they stop at the same one.
After SIGTERM the process ends with status 143, after SIGINT with KeyboardInterrupt, by which Python's status is 130. A
second signal does what it would do without us, so that it ends the process at once. Signals within a second of each
other count as one: a launcher and a scheduler may both send theirs.

Signals are listened to in the main thread alone, while a trainer trains, and where the program has no handler of its
own. A program's own handler stays in place and decides. A forked process, such as a worker of a reward function's pool,
begins with Python's handlers.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, TypeAlias
from weakref import WeakSet

import torch
from accelerate import Accelerator

from trimtab_common.sealing import CheckpointError
from trimtab_common.stats import sum_over_ranks, world_size

Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None

PYTHONS: dict[int, Handler] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
"""The signals, with Python's own handlers."""
SIGNALS = tuple(PYTHONS)
ONE = 1.0
"""Seconds within which several signals count as one."""

_parent = os.getppid()


def status_of(number: int) -> int:
    """The exit status of a process that a signal ends."""
    return 128 + number


def is_preemption(status: int) -> bool:
    """Whether an exit status means that the process was preempted, so that its run should be resumed.

    SIGTERM stops a trial of a sweep for good if the agent that started the trial is still there. A machine that goes
    away ends the agent too.
    """
    return status == status_of(signal.SIGTERM) and not ("WANDB_SWEEP_ID" in os.environ and os.getppid() == _parent)


class _Signals:
    """The signals that this process has received. A process has one handler per signal, so there is one object.

    Attributes:
        number: the first signal, 0: none.
        listeners: who ends the process after a step; without any the handlers are as good as absent.
    """

    def __init__(self) -> None:
        self.number, self.listeners = 0, WeakSet[Interruption]()
        self._time = 0.0
        self._thread = threading.local()
        self._before: dict[int, Handler] = {}

    def listen(self) -> None:
        """Installs the handlers, unless the program has installed its own."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if (before := signal.getsignal(number)) in (signal.SIG_DFL, signal.default_int_handler, exit_now):
                self._before[number] = before
                signal.signal(number, self._on_signal)

    def restore(self) -> None:
        """Restores the former handlers, except for signals whose handler was replaced in the meantime."""
        if threading.current_thread() is threading.main_thread():
            for number, default in PYTHONS.items():
                if signal.getsignal(number) == self._on_signal:  # also where the program has put it back
                    signal.signal(number, self._before.get(number, default))
            self._before.clear()

    def exit_at_sigterm(self, *, exits: bool) -> None:
        """Makes SIGTERM raise SystemExit when no trainer is running. Keeps handlers that the program installed."""
        if threading.current_thread() is not threading.main_thread():
            return
        choice: tuple[Handler, Handler] = (signal.SIG_DFL, exit_now)
        old, new = choice if exits else reversed(choice)
        if self._before.get(signal.SIGTERM) == old:
            self._before[signal.SIGTERM] = new
        elif signal.getsignal(signal.SIGTERM) == old:
            signal.signal(signal.SIGTERM, new)

    def before_fork(self) -> None:
        """Blocks the signals while a thread forks: the child would lose a signal that comes before `in_child`."""
        ours = [number for number in SIGNALS if signal.getsignal(number) == self._on_signal]
        self._thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ours)

    def after_fork(self) -> None:
        """Lets signals through again, in the thread that has forked."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._thread.mask)

    def in_child(self) -> None:
        """Restores Python's handlers in a forked process, because the parent's trainers do not run there."""
        for number, default in PYTHONS.items():
            if signal.getsignal(number) in (self._on_signal, exit_now):
                signal.signal(number, default)
        self.number, self.listeners = 0, WeakSet()
        self._before.clear()
        self.after_fork()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_first = not self.number
        if self.listeners and is_first:
            self.number, self._time = number, time.monotonic()
            text = "ends after this step or update, once the run is saved. A second signal ends it at once."
            os.write(2, f"{signal.Signals(number).name}: process {os.getpid()} {text}\n".encode())
            return
        if self.listeners and (time.monotonic() < self._time + ONE or self._is_of_wandb(number)):
            return
        self.restore()
        signal.raise_signal(number)

    def _is_of_wandb(self, number: int) -> bool:
        """Whether this is the SIGINT that W&B's service sends after the SIGTERM of W&B's agent."""
        return (self.number, number) == SIGNALS and "WANDB_SWEEP_ID" in os.environ


def exit_now(number: int, frame: FrameType | None) -> NoReturn:
    """A handler that closes `with` blocks. It logs nothing: it may have interrupted a call that holds a lock."""
    raise SystemExit(status_of(number))


class Interruption:
    """Handles signals for a trainer: at the end of a step, at the same one in all processes.

    A trainer calls `during_train` around its own loop and `end_if_asked` after each step of it. Its `step`, which
    callers call in loops of their own, begins with `begin_step` and ends with `end_step`.

    Args:
        close: closes the trackers with an exit status.

    Attributes:
        number: the signal by which the processes have agreed to end; 0: none.
        is_in_train: whether the trainer runs its own loop.
    """

    def __init__(self, accelerator: Accelerator, close: Callable[[int], object]) -> None:
        self.accelerator, self.close, self.number, self.is_in_train = accelerator, close, 0, False

    def release(self) -> None:
        """Returns signal handling to the program."""
        _signals.listeners.discard(self)
        if not _signals.listeners:
            _signals.restore()

    @contextmanager
    def during_train(self) -> Iterator[None]:
        """Handles signals inside the block, which runs the trainer's own loop."""
        was_listening = self in _signals.listeners
        self.begin_step()
        self.is_in_train = True
        try:
            yield
        finally:
            self.is_in_train = False
            if not was_listening:
                self.release()

    def is_asked(self) -> bool:
        """Whether any process received a signal; `number` is the signal. Collective; call it once per step."""
        if world_size() == 1:
            self.number = _signals.number if self in _signals.listeners else 0
        else:
            heard = [int(_signals.number == number) for number in SIGNALS]
            counts = sum_over_ranks(torch.tensor(heard, dtype=torch.int32, device=self.accelerator.device)).tolist()
            self.number = next((number for number, count in zip(SIGNALS, counts, strict=True) if count), 0)
        return self.number != 0

    def end_if_asked(self, save: Callable[[], object]) -> None:
        """Where the trainer can save the run: does so and ends the process if a signal asks for it. Collective."""
        if self.is_asked():
            self._save(save)
            self.end()

    def begin_step(self) -> None:
        """Before a step of a caller's loop: ends the process if a signal came in the last one, else notes signals.

        It notes them until `release`, or until the trainer is gone.
        """
        self.end_if_saved()
        if self.is_in_train:
            return
        if not _signals.listeners:
            _signals.number = 0
            _signals.listen()
        _signals.listeners.add(self)

    def end_if_saved(self) -> None:
        """Before anything that belongs to the next step of a caller's loop; see `end_step`. Collective if it ends."""
        if self.number:
            self.end()

    def end_step(self, save: Callable[[], object], *, is_last: bool) -> None:
        """After a step of a caller's loop: saves if a signal asks the process to end. Collective.

        The caller may then log the step. The process ends when the caller goes on to the next one.

        Args:
            save: saves the run; its CheckpointError or ValueError becomes a warning.
            is_last: whether no step is to follow; signals are then left to the program again.
        """
        if self.is_in_train:
            return
        if is_asked := self.is_asked():
            self._save(save)
        if is_asked or is_last:
            self.release()

    def _save(self, save: Callable[[], object]) -> None:
        try:
            save()
        except (CheckpointError, ValueError) as error:
            warnings.warn(f"The process ends with this step, which is not saved: {error}", stacklevel=4)

    def end(self) -> NoReturn:
        """Closes the trackers and ends the process by the signal, once the others have come as far. Collective.

        Raises:
            SystemExit: with status 143, after SIGTERM.
            KeyboardInterrupt: after SIGINT.
        """
        number, self.number = self.number, 0
        self.close(status_of(number))
        self.accelerator.wait_for_everyone()
        self.release()
        _signals.number = 0
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(status_of(number))


_signals = _Signals()
exit_at_sigterm = _signals.exit_at_sigterm
os.register_at_fork(before=_signals.before_fork, after_in_parent=_signals.after_fork, after_in_child=_signals.in_child)
