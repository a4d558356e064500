"""Starting, watching and stopping the process of a trial, as W&B's own agent does it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import wandb
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args
from wandb.sdk.lib.config_util import save_config_file_from_dict

from trimtab_cli.sweep.distributions import SweepError
from trimtab_cli.sweep.preload import Forked, Preloaded
from trimtab_cli.sweep.spec import Sweep
from trimtab_cli.sweep.store import Store, Trial, try_lock

KILL_DELAY = 30.0  # seconds between SIGTERM and SIGKILL, the agent's default
FLUSH_INTERVAL = "2"  # seconds; W&B's default of 15 would let bad runs go on for long


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


def environment(sweep: Sweep, store: Store, *, jobs: int) -> dict[str, str]:
    """The variables that all trials have: offline unless WANDB_MODE is set, and a share of the cores."""
    env = dict(os.environ)
    env.pop(wandb.env.SERVICE, None)
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])  # python is ours
    for name, value in (
        ("WANDB_MODE", "offline"),
        ("WANDB_DIR", str(store.folder)),
        ("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // jobs))),
        ("WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL", FLUSH_INTERVAL),
    ):
        env.setdefault(name, value)
    for key in ("project", "entity"):
        if sweep.get(key):
            env[f"WANDB_{key.upper()}"] = sweep.get(key)
    return env | {"WANDB_SWEEP_ID": store.sweep_id}


def start(
    sweep: Sweep, store: Store, trial: Trial, *, jobs: int, preloaded: Preloaded | None = None
) -> subprocess.Popen[bytes] | Forked:
    """Start a trial's process in a group of its own; its log stays locked until the process has ended."""
    folder = Path(os.environ.get("WANDB_DIR") or store.folder).resolve() / "wandb" / f"sweep-{store.sweep_id}"
    folder.mkdir(parents=True, exist_ok=True)
    param_path = folder / f"config-{trial.run_id}.yaml"
    args = {name: {"value": value} for name, value in trial.parameters.items()}
    save_config_file_from_dict(str(param_path), args)
    words = fill_command(
        sweep.command, program=sweep.get("program") or "", args=args, json_file=param_path.with_suffix(".json")
    )
    env = {"WANDB_RUN_ID": trial.run_id, "WANDB_SWEEP_PARAM_PATH": str(param_path)}
    log = store.log_of(trial)
    log.parent.mkdir(exist_ok=True)
    if preloaded is not None:
        return preloaded.start(words[words.index(sweep.get("program")) :], env, log)
    with log.open("w") as output:
        try_lock(output)
        return subprocess.Popen(
            words,
            env=environment(sweep, store, jobs=jobs) | env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )


def signal_group(pid: int, number: signal.Signals) -> None:
    """Send a signal to a group of processes, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def end_leftover(trial: Trial) -> None:
    """End the processes of a trial whose sweep was killed: those that still hold the log, and their groups.

    A process writes to its log from its first moment, so that no kill of the sweep leaves one that is not found.

    Raises:
        SweepError: a process does not end.
    """
    log = Path(trial.log)
    if not log.is_file():
        return
    with log.open("a") as file:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if try_lock(file):
                return
            for group in groups_that_hold(log):
                signal_group(group, number)
            deadline = time.monotonic() + kill_delay()
            while time.monotonic() < deadline:
                if try_lock(file):
                    return
                time.sleep(0.1)
    raise SweepError(
        f"trial {trial.number}: a process of its run {trial.run_id} does not end. End it; {log} is its log."
    )


def groups_that_hold(log: Path) -> set[int]:
    """The process groups, other than this process's own, in which a process has the file open."""
    groups = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):  # it has ended, or belongs to someone else
            if any(file.path == str(log) for file in process.open_files()):
                groups.add(os.getpgid(process.pid))
    return groups - {os.getpgrp()}


def kill_delay() -> float:
    """Seconds between SIGTERM and SIGKILL, by the agent's environment variable."""
    return float(os.environ.get("WANDB_AGENT_KILL_DELAY", KILL_DELAY))
