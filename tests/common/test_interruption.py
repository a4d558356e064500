"""What signals do to a process: which handlers are installed, and what a second signal does."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from trimtab_common import interruption
from trimtab_common.interruption import Interruption, exit_at_sigterm, is_preemption


@pytest.fixture(autouse=True)
def nobody_listens() -> None:
    """Releases trainers that other tests left listening because their loops never reached the last step."""
    for one in list(interruption._signals.listeners):
        one.release()


@pytest.fixture
def statuses() -> list[int]:
    """Statuses with which the trackers of `trainer` were closed."""
    return []


@pytest.fixture
def trainer(statuses: list[int]) -> Iterator[Interruption]:
    trainer = Interruption(Accelerator(cpu=True), close=statuses.append)
    yield trainer
    trainer.release()


def tell(number: int) -> None:
    os.kill(os.getpid(), number)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in interruption.SIGNALS]


def test_the_programs_handlers_come_back(trainer):
    before = handlers()
    with trainer.during_train():
        assert all(one != other for one, other in zip(handlers(), before, strict=True))
    assert handlers() == before
    with pytest.raises(RuntimeError, match="reward"), trainer.during_train():
        raise RuntimeError("reward")
    assert handlers() == before


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_is_noted_and_ends_the_process_where_the_step_ends(trainer, statuses, number, error):
    before, saved = handlers(), []

    def train() -> None:
        with trainer.during_train():
            trainer.end_if_asked(lambda: saved.append(1))
            tell(number)
            tell(number)  # a launcher may repeat the scheduler's signal
            assert saved == []
            trainer.end_if_asked(lambda: saved.append(2))

    with pytest.raises(error) as ended:
        train()
    assert saved == [2]
    assert statuses == [128 + number]
    assert ended.value.args == ((143,) if error is SystemExit else ())
    assert handlers() == before
    with trainer.during_train():  # as after an interrupted notebook cell
        trainer.end_if_asked(lambda: saved.append(3))
    assert saved == [2]


def test_a_callers_step_is_saved_at_its_end_and_the_process_ends_before_the_next(trainer, statuses):
    before, saved = handlers(), []
    trainer.begin_step()
    tell(signal.SIGTERM)
    trainer.end_step(lambda: saved.append(1), is_last=False)
    assert (saved, statuses) == ([1], [])  # the caller logs the step first
    assert handlers() == before  # everything is saved, so a second signal may end the process
    with pytest.raises(SystemExit):
        trainer.begin_step()
    assert statuses == [143]


def test_after_the_last_step_of_a_callers_loop_signals_are_the_programs(trainer):
    before = handlers()
    trainer.begin_step()
    trainer.end_step(list, is_last=True)
    assert handlers() == before


def test_a_trainer_that_is_gone_leaves_signals_to_the_program(statuses):
    heard: list[int] = []
    trainer = Interruption(Accelerator(cpu=True), close=statuses.append)
    trainer.begin_step()
    del trainer
    with pytest.raises(KeyboardInterrupt):
        tell(signal.SIGINT)
    assert heard == []


def test_handlers_that_the_program_puts_back_after_the_run_do_what_python_does(trainer):
    before = handlers()
    with trainer.during_train():
        ours = handlers()
    for number, handler in zip(interruption.SIGNALS, ours, strict=True):
        signal.signal(number, handler)
    with pytest.raises(KeyboardInterrupt):
        tell(signal.SIGINT)
    assert handlers() == before


def test_a_handler_of_the_programs_own_stays(trainer):
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with trainer.during_train():
            tell(signal.SIGTERM)
            assert not trainer.is_asked()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]


def test_a_handler_that_the_program_installs_meanwhile_stays(trainer):
    before = signal.getsignal(signal.SIGTERM)
    with trainer.during_train():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_another_thread_trains_without_handlers(trainer):
    before, seen = handlers(), []

    def train() -> None:
        with trainer.during_train():
            seen.append(handlers())
            trainer.end_if_asked(list)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [before]


def test_what_cannot_be_saved_is_a_warning_and_the_process_ends(trainer, statuses):
    def save() -> None:
        raise ValueError("there is no folder")

    trainer.begin_step()
    tell(signal.SIGTERM)
    with pytest.warns(UserWarning, match="which is not saved: there is no folder"):
        trainer.end_step(save, is_last=False)
    with pytest.raises(SystemExit):
        trainer.begin_step()
    assert statuses == [143]


def test_sigterm_raises_system_exit_for_a_tracker_where_no_trainer_trains(trainer):
    before = handlers()
    with trainer.during_train():
        exit_at_sigterm(exits=True)  # a tracker started in the first step does this
    with pytest.raises(SystemExit):
        tell(signal.SIGTERM)
    exit_at_sigterm(exits=False)
    assert handlers() == before


def status_of_fork(child: Callable[[], object]) -> int:
    """Returns the exit status of a forked process that runs a function and then ends with status 7."""
    if not (pid := os.fork()):
        try:
            child()
            os._exit(7)
        except SystemExit as end:
            os._exit(int(end.code or 0))
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("exits", [False, True])
def test_a_forked_process_has_pythons_handlers_and_its_parent_keeps_its_own(trainer, exits):
    def child() -> None:
        assert handlers() == list(interruption.PYTHONS.values())
        tell(signal.SIGTERM)

    exit_at_sigterm(exits=exits)  # a tracker's handler
    assert status_of_fork(child) == -signal.SIGTERM
    with trainer.during_train():
        ours = handlers()
        assert status_of_fork(child) == -signal.SIGTERM
        assert handlers() == ours
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
        tell(signal.SIGTERM)
        assert trainer.is_asked()
    exit_at_sigterm(exits=False)


def test_a_handler_of_the_programs_own_goes_into_a_forked_process(trainer):
    before = signal.signal(signal.SIGTERM, lambda number, frame: os._exit(5))
    try:
        with trainer.during_train():
            assert status_of_fork(lambda: tell(signal.SIGTERM)) == 5
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_forked_process_that_trains_has_a_trainer_of_its_own(trainer, statuses):
    def child() -> None:
        own = Interruption(trainer.accelerator, close=statuses.append)
        with own.during_train():
            tell(signal.SIGTERM)
            own.end_if_asked(list)

    with trainer.during_train():
        assert status_of_fork(child) == 143
        assert not trainer.is_asked()


def test_workers_of_a_reward_function_end_when_they_are_told_to(trainer):
    context = multiprocessing.get_context("fork")
    with trainer.during_train():
        for _ in range(20):  # at once, before the child runs a line
            process = context.Process(target=time.sleep, args=(60,))
            process.start()
            process.terminate()
            process.join(10)
            assert process.exitcode == -signal.SIGTERM
        with context.Pool(2) as pool:
            assert pool.map(abs, [-1, -2]) == [1, 2]
        with ProcessPoolExecutor(1, mp_context=context) as workers:
            answer = workers.submit(time.sleep, 60)
            for worker in (workers._processes or {}).values():
                worker.terminate()
            with pytest.raises(BrokenProcessPool):
                answer.result(timeout=10)


def test_the_agent_of_a_sweep_stops_a_trial_for_good_while_it_lives(monkeypatch):
    assert is_preemption(143)
    assert not is_preemption(130)
    monkeypatch.setenv("WANDB_SWEEP_ID", "s")
    assert not is_preemption(143)
    monkeypatch.setattr(interruption, "_parent", -1)  # the agent's process has ended
    assert is_preemption(143)


SECOND = """
import os, signal, sys, time
from accelerate import Accelerator
from trimtab_common.interruption import Interruption
trainer = Interruption(Accelerator(cpu=True), close=print)
with trainer.during_train():
    for name in sys.argv[1:]:
        os.kill(os.getpid(), getattr(signal, name))
        time.sleep(1.1)
    trainer.end_if_asked(lambda: print("saved"))
"""


@pytest.mark.parametrize(
    ("signals", "sweep", "status"),
    [
        (["SIGTERM", "SIGTERM"], None, -15),
        pytest.param(["SIGINT", "SIGINT"], None, -2, marks=pytest.mark.slow),
        pytest.param(["SIGTERM", "SIGINT"], None, -2, marks=pytest.mark.slow),
        (["SIGTERM", "SIGINT"], "a W&B service follows its agent's signal", 143),
        (["SIGTERM"], None, 143),
    ],
)
def test_a_second_signal_ends_the_process_at_once(tmp_path: Path, signals, sweep, status):
    environment = os.environ | ({} if sweep is None else {"WANDB_SWEEP_ID": "s"})
    command = [sys.executable, "-c", SECOND, *signals]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    assert ("saved" in done.stdout) == (status == 143)
    assert "SIG" in done.stderr
