"""Run a W&B sweep file here, without a server: trimtab sweep FILE --count 8 --jobs 2

The file is the one that `wandb sweep` takes: method grid, random or bayes (Optuna's TPE), every distribution, nested
parameters, the command with its macros, metric, run_cap, and hyperband early_terminate. Run it where `wandb agent`
would run, since `program` is meant from there. Trials are processes with an agent's environment, W&B offline unless
WANDB_MODE says otherwise, and the sweep's id in their runs, so that `wandb sync` can upload them later.

The same call again goes on where the last one ended: finished runs stay, runs that were cut off are run again. Status
143 says that some trials were cut off. State, logs and, unless WANDB_DIR is set, the runs' own folders are in
runs/sweeps/<name>/.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from trimtab_cli.sweep.report import draw, table
from trimtab_cli.sweep.runner import Runner
from trimtab_cli.sweep.search import grid_size
from trimtab_cli.sweep.spec import Sweep, SweepError, read_sweep
from trimtab_cli.sweep.store import FAILED, INTERRUPTED, Store

PROGRAM = "trimtab sweep"
BY_PYTHON = ["${env}", "${interpreter}", "${program}"]
EXPONENT_KINDS = ("log_uniform", "inv_log_uniform", "q_log_uniform")


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="the sweep file")
    parser.add_argument(
        "--count", metavar="N", type=int, help="trials in the whole sweep, over all calls; run_cap is obeyed too"
    )
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="trials at a time (default 1)")
    parser.add_argument(
        "--report", action="store_true", help="then rank the trials and draw report.png; --count 0 for that alone"
    )
    parser.add_argument("--seed", type=int, help="of random and bayes, in a new sweep (default 0)")
    parser.add_argument("--folder", type=Path, help="the sweep's folder (default runs/sweeps/<name>)")
    parser.add_argument(
        "--sweep-id", help="id of a sweep that `wandb sweep` has made, for runs that will be synced to it"
    )
    parser.add_argument("--retry-failed", action="store_true", help="run failed trials again")
    parser.add_argument(
        "--preload",
        metavar="MODULE",
        action="append",
        default=[],
        help="import this module once and fork all trials from there, which saves short trials the time of their "
        "imports; may be given again; not on a GPU, which a fork cannot use",
    )
    return parser.parse_args(argv)


def trials_wanted(sweep: Sweep, count: int | None) -> int:
    """How many trials the sweep gets: the least of --count, run_cap and the grid's size."""
    limits = [limit for limit in (count, sweep.get("run_cap")) if limit is not None]
    if sweep.method == "grid":
        limits.append(grid_size(sweep))
    if not limits:
        raise SweepError(f"method: {sweep.method} has no end. Give --count, or run_cap in the file.")
    return min(limits)


def warn_of_exponents(sweep: Sweep) -> None:
    """Print the values that bounds in exponents of e stand for."""
    for parameter in sweep.parameters:
        if parameter.kind in EXPONENT_KINDS:
            low, high = sorted((parameter.at(0.0), parameter.at(1.0)))
            print(
                f"{parameter.name}: bounds of {parameter.kind} are exponents of e, giving {low:.4g} to {high:.4g}; "
                f"{parameter.kind}_values takes the values themselves.",
                file=sys.stderr,
            )


def check_program(sweep: Sweep) -> None:
    """Raise SweepError if the program of the sweep is neither below this folder nor on PATH."""
    program = sweep.get("program")
    if program and "${program}" in sweep.command and not Path(program).is_file() and not shutil.which(program):
        raise SweepError(
            f"program: {program} is not below {Path.cwd()}. Run the sweep from the folder it is meant from."
        )


def check_fork(sweep: Sweep) -> None:
    """Raise SweepError if the command does not run the program by Python, as a forked trial does."""
    if sweep.command[: len(BY_PYTHON)] != BY_PYTHON:
        needed, got = " ".join(BY_PYTHON), " ".join(map(str, sweep.command))
        raise SweepError(f"--preload: the command has to begin with {needed}, got {got}.")


def main(argv: Sequence[str]) -> int:
    """Run a sweep, or what is left of it.

    Returns:
        0; 2 where the sweep cannot be run; 143 where trials are left that were cut off; 128 and the number of the
        signal that ended the sweep.
    """
    flags = arguments(argv)
    store = None
    try:
        if flags.jobs < 1 or (flags.count is not None and flags.count < 0):
            raise SweepError("--jobs needs 1 or more, --count 0 or more.")
        sweep = read_sweep(flags.file)
        count = trials_wanted(sweep, flags.count)
        if count:
            check_program(sweep)
        if flags.preload:
            check_fork(sweep)
        warn_of_exponents(sweep)
        folder = flags.folder or Path(
            "runs", "sweeps", re.sub(r"[^A-Za-z0-9._-]+", "-", sweep.name).strip("-.") or "sweep"
        )
        store = Store(folder, sweep, seed=flags.seed, sweep_id=flags.sweep_id)
        if flags.retry_failed:
            for trial in store.trials:
                trial.status = INTERRUPTED if trial.status == FAILED else trial.status
        status = 0
        if count:
            status = Runner(sweep, store, count=count, jobs=flags.jobs, preload=flags.preload).run()
        print(f"sweep {store.sweep_id}: {len(store.trials)} trial(s) in {store.folder}")
        if flags.report:
            figure = draw(sweep, store)
            print(f"\n{table(sweep, store.trials)}" + (f"\n\nfigure: {figure}" if figure else ""))
        return status
    except SweepError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    finally:
        if store is not None:
            store.close()
