"""The loop that runs a sweep: starts trials, stops bad ones, collects what ended, and keeps trials.jsonl true."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from trimtab_cli.sweep import launch
from trimtab_cli.sweep.hyperband import runs_to_stop
from trimtab_cli.sweep.preload import Forked, Preloaded
from trimtab_cli.sweep.records import RunFile, find_run_file, is_finite
from trimtab_cli.sweep.search import suggest
from trimtab_cli.sweep.spec import Sweep
from trimtab_cli.sweep.store import FAILED, FINISHED, INTERRUPTED, RUNNING, STOPPED, Store, Trial, new_id

POLL = 0.2  # seconds
READ = 1.0  # seconds between two looks at the files of running trials
PREEMPTED = 128 + signal.SIGTERM
"""The exit status by which a training says that SIGTERM ended it; see trimtab_common.interruption.status_of."""
TAIL = 20  # lines of a failed run's log that are kept


@dataclass
class Job:
    """A trial whose process runs."""

    trial: Trial
    process: subprocess.Popen[bytes] | Forked
    began: float
    stopping: str = ""  # why it was told to end
    told: float = 0.0


class Runner:
    """Runs trials until there are `count` of them, the grid is at its end, or one has reached the metric's target.

    With `preload`, names of modules, trials are forked from a process that has imported them.
    """

    def __init__(self, sweep: Sweep, store: Store, *, count: int, jobs: int, preload: Sequence[str] = ()) -> None:
        self.sweep, self.store, self.count, self.jobs, self.preload = sweep, store, count, jobs, preload
        self.running: list[Job] = []
        self.preloaded: Preloaded | None = None
        self.signals: list[int] = []
        self.preempted: set[int] = set()  # trials that SIGTERM ended in this call, and the next call runs again
        self._files: dict[str, RunFile] = {}  # by run id
        self._looked = 0.0
        self._compared: dict[int, int] = {}  # iterations that trials had when Hyperband last saw them

    def run(self) -> int:
        """0, or 128 and the number of the signal that ended the sweep or a trial of it."""
        self._adopt_interrupted()
        handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while not self.signals:
                self._collect()
                self._stop_bad_runs()
                while len(self.running) < self.jobs and (trial := self._next()):
                    self._start(trial)
                if not self.running:
                    return PREEMPTED if self.preempted else 0
                time.sleep(POLL)
            return 128 + self.signals[0]
        finally:
            self._stop_all()
            if self.preloaded is not None:
                self.preloaded.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def history(self, trial: Trial) -> list[float]:
        """The finite values of the metric that a trial has logged so far."""
        file = self._file(trial)
        return file.history(self.sweep.metric.name) if file and self.sweep.metric else []

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)

    def _adopt_interrupted(self) -> None:
        for trial in self.store.trials:
            if trial.status == RUNNING:
                launch.end_leftover(trial)
                trial.status = INTERRUPTED
        self.store.save()

    def _next(self) -> Trial | None:
        metric, trials, number = self.sweep.metric, self.store.trials, len(self.store.trials)
        if metric and any(t.status == FINISHED and t.metric is not None and metric.reached(t.metric) for t in trials):
            return None
        for trial in trials:
            if trial.status == INTERRUPTED and trial.number not in self.preempted:
                return trial
        if number >= self.count:
            return None
        suggestion = suggest(self.sweep, number=number, seed=self.store.seed, trials=trials, history=self.history)
        if suggestion is None:
            return None
        trials.append(Trial(number, suggestion.parameters, suggestion.point))
        return trials[-1]

    def _start(self, trial: Trial) -> None:
        # A run that was cut off keeps its id and folders to itself.
        trial.run_id, trial.run_file = new_id(), ""
        trial.status, trial.message, trial.metric, trial.seconds = RUNNING, "", None, None
        self._compared.pop(trial.number, None)
        trial.log = str(self.store.log_of(trial))
        self.store.save()  # before there is a process, so that none is ever unknown
        say(f"trial {trial.number} starts as run {trial.run_id}: {self._shown(trial)}")
        if self.preload and self.preloaded is None:
            self.preloaded = Preloaded(self.preload, launch.environment(self.sweep, self.store, jobs=self.jobs))
        try:
            process = launch.start(self.sweep, self.store, trial, jobs=self.jobs, preloaded=self.preloaded)
        except OSError as error:
            self._end(trial, FAILED, f"the command does not start: {error}")
            return
        self.running.append(Job(trial, process, time.monotonic()))

    def _shown(self, trial: Trial) -> str:
        pairs = [(parameter, value_of(trial, parameter.path)) for parameter in self.sweep.varied]
        return ", ".join(f"{p.name}={f'{v:.6g}' if isinstance(v, float) else v}" for p, v in pairs)

    def _collect(self) -> None:
        for job in list(self.running):
            code = job.process.poll()
            if code is None:
                if job.told and time.monotonic() > job.told + launch.kill_delay():
                    launch.signal_group(job.process.pid, signal.SIGKILL)
                continue
            self.running.remove(job)
            job.trial.seconds = round(time.monotonic() - job.began, 3)
            self._judge(job, code)

    def _judge(self, job: Job, code: int) -> None:
        trial, metric = job.trial, self.sweep.metric
        file = self._file(trial, search=True)
        value = file.summary.get(metric.name) if file and metric else None
        if job.stopping:
            trial.metric = float(value) if is_finite(value) else next(iter(self.history(trial)[-1:]), None)
            self._end(trial, STOPPED, job.stopping)
        elif code in (PREEMPTED, -signal.SIGTERM):
            self.preempted.add(trial.number)
            self._end(trial, INTERRUPTED, "SIGTERM from elsewhere; the next call of the sweep runs it again")
        elif code != 0:
            cause = f"exit status {code}" if code > 0 else f"signal {-code}"
            self._end(trial, FAILED, f"{cause}; the end of its log:\n{tail(Path(trial.log))}")
        elif file is None:
            places = ", ".join(str(root) for root in self._roots())
            self._end(trial, FAILED, f"no W&B run {trial.run_id} lies below {places}. Does the program log to W&B?")
        elif metric is not None and metric.name not in file.summary:
            names = ", ".join(sorted(name for name in file.summary if not name.startswith("_"))) or "nothing"
            self._end(trial, FAILED, f"the run's summary has no {metric.name!r}; it has {names}.")
        elif metric is not None and not is_finite(value):
            self._end(trial, FAILED, f"{metric.name} is {value!r}; a finite number is needed.")
        else:
            trial.metric = float(value) if is_finite(value) else None
            self._end(trial, FINISHED, "")

    def _end(self, trial: Trial, status: str, message: str) -> None:
        trial.status, trial.message = status, message
        self.store.save()
        what = (
            f"{self.sweep.metric.name} = {trial.metric:.6g}" if trial.metric is not None and self.sweep.metric else ""
        )
        took = f" after {trial.seconds:.0f} s" if trial.seconds is not None else ""
        say(f"trial {trial.number} {status}{took}: {'; '.join(part for part in (what, message) if part) or 'done'}")

    def _stop_bad_runs(self) -> None:
        """Read the files of running trials, and stop those that Hyperband gives up."""
        if time.monotonic() < self._looked + READ:
            return
        self._looked = time.monotonic()
        metric, settings = self.sweep.metric, self.sweep.early_terminate
        if metric is None or (settings is None and metric.impute_while_running == "false"):
            return
        for job in self.running:
            self._file(job.trial, search=True)
        if settings is None:
            return
        histories = {trial.number: self.history(trial) for trial in self.store.trials}
        going = {job.trial.number: job for job in self.running if not job.told}
        bad = runs_to_stop(settings, histories, list(going), sign=metric.sign, compared=self._compared)
        self._compared = {number: len(values) for number, values in histories.items()}
        for number, reason in bad.items():
            job = going[number]
            job.stopping, job.told = f"stopped early: {reason}", time.monotonic()
            job.process.terminate()

    def _stop_all(self) -> None:
        """End what runs: SIGTERM, and after a while, or at a second signal, SIGKILL."""
        for job in self.running:
            job.process.terminate()
        if self.running:
            say(f"stopping {len(self.running)} running trial(s); they run again when the sweep goes on")
        deadline = time.monotonic() + launch.kill_delay()
        for job in self.running:
            while job.process.poll() is None:
                if time.monotonic() > deadline or len(self.signals) > 1:
                    launch.signal_group(job.process.pid, signal.SIGKILL)
                time.sleep(0.05)
            job.trial.status = INTERRUPTED
        self.running.clear()
        self.store.save()

    def _roots(self) -> list[Path]:
        """Where W&B's files may be: the folder that it was told, then what lies below the working directory."""
        told = Path(os.environ.get("WANDB_DIR") or self.store.folder)
        return [told, *(path for path in (Path("runs").resolve(), Path.cwd()) if path.is_dir())]

    def _file(self, trial: Trial, search: bool = False) -> RunFile | None:
        """What a trial's run has written so far, read up to its present end."""
        if search and not trial.run_file:
            trial.run_file = str(find_run_file(trial.run_id, self._roots()) or "")
        if not trial.run_file or not Path(trial.run_file).is_file():
            return None
        file = self._files.setdefault(trial.run_id, RunFile(Path(trial.run_file)))
        return file.update()


def value_of(trial: Trial, path: tuple[str, ...]) -> object:
    """A trial's value of the parameter at `path`."""
    value: object = trial.parameters
    for key in path:
        assert isinstance(value, dict)
        value = value[key]
    return value


def tail(log: Path, lines: int = TAIL) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)
