"""The loop that runs a sweep: starts trials as W&B's agent does, reads what they log, and stops bad ones."""

import contextlib
import json
import math
import operator
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import psutil
import wandb
from optuna.trial import TrialState
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args
from wandb.sdk.lib.config_util import save_config_file_from_dict

from trimtab_common.tracking import METRICS_FILE

from .spec import Sweep, SweepError
from .study import next_trial, queue_again, trials_of

PREEMPTED = 128 + signal.SIGTERM
"""The exit status by which a training says that SIGTERM ended it; see trimtab_common.interruption.status_of."""
TAIL = 20  # lines of a failed run's log that are kept
Start = Callable[[Sequence[str], Mapping[str, str], Path], Any]


def fill_command(command: Sequence[Any], *, program: str, args: Mapping[str, Any], json_file: Path) -> list[str]:
    """The words of a sweep's command with its macros replaced, by the agent's functions; args: {name: {value: v}}."""
    template = create_sweep_command(list(command))  # ${envvar:NAME}
    macros = create_sweep_command_args({"args": args})
    macros |= {"env": ["/usr/bin/env"], "interpreter": ["python"], "program": [program]}
    if "${args_json_file}" in template:
        json_file.write_text(macros["args_json"][0], encoding="utf-8")
    macros["args_json_file"] = [str(json_file)]
    words: list[str] = []
    for word in map(str, template):
        words += macros.get(word[2:-1], []) if word.startswith("${") and word.endswith("}") else [word]
    return words


def start_process(words: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a trial's process in its own process group; it writes to its log."""
    with log.open("w") as out:
        return subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, process_group=0)


def signal_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to the group of a process, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpgid(pid), number)


def end_leftovers(log: Path, patience: float) -> None:
    """End the processes of a trial whose sweep was killed: they still have its log open."""
    found = psutil.process_iter(["open_files"])  # None for a process of someone else's
    left = [process for process in found if str(log) in {file.path for file in process.info["open_files"] or ()}]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in left:
            signal_group(process.pid, number)
        _, left = psutil.wait_procs(left, timeout=patience)
    if left:
        raise SweepError(f"process {left[0].pid} of a trial that was cut off does not end. End it; {log} is its log.")


def is_finite(value: object) -> bool:
    """Whether a value is a finite number, and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def rows_of(log: Path) -> list[dict[Any, Any]]:
    """What a trial has logged so far, in whole lines of the file beside its log."""
    text = log.with_suffix(".jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


class Runner:
    """Runs trials until there are `count` of them, the grid is at its end, or one has reached the metric's target."""

    def __init__(
        self, sweep: Sweep, study: optuna.Study, folder: Path, *, count: float, jobs: int, start: Start = start_process
    ) -> None:
        self.sweep, self.study, self.folder, self.count, self.jobs = sweep, study, folder, count, jobs
        self.start, self.metric = start, sweep.metric.name if sweep.metric else None
        self.signals: list[int] = []
        self.preempted = False
        self.patience = float(os.environ.get("WANDB_AGENT_KILL_DELAY", 30))  # as the agent
        cores = str(max(1, len(os.sched_getaffinity(0)) // jobs))
        env = {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "OMP_NUM_THREADS": cores, **os.environ}
        env.pop(wandb.env.SERVICE, None)
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])  # python is ours
        env |= {f"WANDB_{key.upper()}": name for key in ("project", "entity") if (name := getattr(sweep, key))}
        self.env = env | {"WANDB_SWEEP_ID": study.user_attrs["id"]}

    def run(self) -> int:
        """0, or 128 and the number of the signal that ended the sweep or a trial of it."""
        for trial in trials_of(self.study):
            if trial.state == TrialState.RUNNING:
                end_leftovers(log_of(self.folder, trial.number), self.patience)
                self.study.tell(trial.number, state=TrialState.FAIL)
        queue_again(self.study, ["interrupted"])
        numbers = (signal.SIGINT, signal.SIGTERM)
        handlers = [signal.signal(number, lambda number, _: self.signals.append(number)) for number in numbers]
        running: list[Iterator[bool]] = []
        try:
            while True:
                running = [steps for steps in running if next(steps, False)]
                while not self.signals and len(running) < self.jobs and (trial_now := self._next()):
                    running.append(self._steps(trial_now))
                    next(running[-1])
                if not running:
                    return 128 + self.signals[0] if self.signals else PREEMPTED if self.preempted else 0
                time.sleep(0.2)
        finally:
            for number, handler in zip(numbers, handlers, strict=True):
                signal.signal(number, handler)

    def _next(self) -> optuna.Trial | None:
        metric = self.sweep.metric
        if metric and metric.target is not None:
            reaches = operator.le if metric.goal == "minimize" else operator.ge
            if any(reaches(trial.value, metric.target) for trial in trials_of(self.study) if trial.value is not None):
                return None
        return next_trial(self.sweep, self.study, seed=self.study.user_attrs["seed"], count=self.count)

    def _steps(self, trial: optuna.Trial) -> Iterator[bool]:
        """Run a trial: start its process, yield while it runs, and record how it ended."""
        log, band = log_of(self.folder, trial.number), self.sweep.early_terminate
        best = min if self.study.direction == optuna.study.StudyDirection.MINIMIZE else max
        process, began = self._start(trial, log), time.monotonic()
        reason, rung, read, deadline = "", 0, 0, math.inf
        try:
            while (code := process.poll()) is None:
                if band and not reason and (size := log.with_suffix(".jsonl").stat().st_size) > read:
                    read = size
                    values: list[float] = [row[self.metric] for row in rows_of(log) if is_finite(row.get(self.metric))]
                    for rung in [number for number in band.rungs if rung < number <= len(values)]:
                        value = values[rung - 1] if band.strict else best(values[:rung])
                        trial.report(value, rung)
                        if not reason and trial.should_prune():
                            reason = f"stopped early: {value:.6g} at iteration {rung}"
                if (reason or self.signals) and deadline == math.inf:
                    process.terminate()
                    deadline = time.monotonic() + self.patience
                elif time.monotonic() > deadline or len(self.signals) > 1:
                    signal_group(process.pid, signal.SIGKILL)
                yield True
        finally:
            if process.poll() is None:  # the sweep ends by an error
                signal_group(process.pid, signal.SIGKILL)
        self._record(trial, log, code, reason, round(time.monotonic() - began, 3))

    def _start(self, trial: optuna.Trial, log: Path) -> Any:
        run_id = secrets.token_hex(4)
        configs = Path(self.env["WANDB_DIR"], "wandb", f"sweep-{self.env['WANDB_SWEEP_ID']}").resolve()
        trial.set_user_attr("run_id", run_id)
        file, metrics = configs / f"config-{run_id}.yaml", log.with_suffix(".jsonl")
        for path in (file, metrics):
            path.parent.mkdir(parents=True, exist_ok=True)
        args = {name: {"value": value} for name, value in trial.user_attrs["parameters"].items()}
        save_config_file_from_dict(str(file), args)
        metrics.touch()
        program, json_file = self.sweep.program or "", file.with_suffix(".json")
        words = fill_command(self.sweep.command, program=program, args=args, json_file=json_file)
        variables = {"WANDB_RUN_ID": run_id, "WANDB_SWEEP_PARAM_PATH": str(file), METRICS_FILE: str(metrics)}
        print(f"trial {trial.number} starts as run {run_id}: {json.dumps(trial.user_attrs['parameters'])}", flush=True)
        try:
            return self.start(words, self.env | variables, log)
        except OSError as error:
            raise SweepError(f"command: {words[0]} does not start: {error}") from error

    def _record(self, trial: optuna.Trial, log: Path, code: int, reason: str, seconds: float) -> None:
        logged = {name: value for row in rows_of(log) for name, value in row.items()}
        value = logged.get(self.metric) if self.metric else 0.0  # Optuna wants a value of what has finished
        status, message, state = "failed", "", TrialState.PRUNED  # which counts as worse than all that have finished
        if reason:
            status, message = "stopped", reason
        elif self.signals or code in (PREEMPTED, -signal.SIGTERM):
            self.preempted = True
            status, message, state = "interrupted", "the next call of the sweep runs it again", TrialState.FAIL
        elif code != 0:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
            ended = f"exit status {code}" if code > 0 else f"signal {-code}"
            message = "\n".join([f"{ended}; the end of {log}:", *lines])
        elif value is None:
            names = ", ".join(sorted(logged)) or f"nothing into the file of {METRICS_FILE}"
            message = f"no {self.metric!r} was logged; it has logged {names}."
        elif not is_finite(value):
            message = f"{self.metric} is {value!r}; a finite number is needed."
        else:
            status, message, state = "finished", f"{self.metric} = {value:.6g}", TrialState.COMPLETE
        for name, about in {"status": status, "message": message, "seconds": seconds}.items():
            trial.set_user_attr(name, about)
        self.study.tell(trial, value if state == TrialState.COMPLETE else None, state)
        print(f"trial {trial.number} {status} after {seconds:.0f} s: {message}", flush=True)


def log_of(folder: Path, number: int) -> Path:
    """The file that a trial prints into; beside it is the one with what it logged."""
    return folder / "logs" / f"{number:04d}.log"
