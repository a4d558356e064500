"""Run a W&B sweep file here, without a server: trimtab sweep FILE --count 8 --jobs 2

The file is the one that `wandb sweep` takes: method grid, random or bayes (Optuna's TPE), every distribution, nested
parameters, the command with its macros, metric, run_cap, and hyperband early_terminate. Run it where `wandb agent`
would run, since `program` is meant from there. Trials are processes with an agent's environment, W&B offline unless
WANDB_MODE says otherwise, and the sweep's id in their runs, so that `wandb sync` can upload them later.

The same call again goes on where the last one ended: finished runs stay, runs that were cut off are run again. Status
143 says that some trials were cut off. An Optuna study (journal.log), logs and, unless WANDB_DIR is set, the runs' own
folders are in runs/sweeps/<name>/.
"""

import argparse
import math
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .spec import SweepError, read_sweep


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(
        prog="trimtab sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("file", metavar="FILE", type=Path, help="the sweep file")
    add("--count", metavar="N", type=int, help="trials in the whole sweep, over all calls; run_cap is obeyed too")
    add("--jobs", metavar="N", type=int, default=1, help="trials at a time (default 1)")
    add("--report", action="store_true", help="then rank the trials; --count 0 for that alone")
    add("--seed", type=int, help="of random and bayes, in a new sweep (default 0)")
    add("--folder", type=Path, help="the sweep's folder (default runs/sweeps/<name>)")
    add("--sweep-id", help="id of a sweep that `wandb sweep` has made, for runs that will be synced to it")
    add("--retry-failed", action="store_true", help="run failed trials again")
    return parser.parse_args(argv)


def main(argv: Sequence[str], **options: Any) -> int:
    """Run a sweep, or what is left of it; `options` are those of `Runner`.

    Returns:
        0; 1 where every trial failed; 2 where the sweep cannot be run; 143 where trials are left that were cut off; 128
        and the number of the signal that ended the sweep.
    """
    try:
        return run(arguments(argv), options)
    except SweepError as error:
        print(f"trimtab sweep: error: {error}", file=sys.stderr)
        return 2


def run(flags: argparse.Namespace, options: Mapping[str, Any]) -> int:
    """Run the sweep of the flags; SweepError where it cannot be run."""
    if flags.jobs < 1 or (flags.count or 0) < 0:
        raise SweepError("--jobs needs 1 or more, --count 0 or more.")
    sweep = read_sweep(flags.file)
    count = min(limit for limit in (flags.count, sweep.run_cap, math.inf) if limit is not None)
    if sweep.method != "grid" and count == math.inf:
        raise SweepError(f"method: {sweep.method} has no end. Give --count, or run_cap in the file.")
    if sweep.program and not Path(sweep.program).is_file() and not shutil.which(sweep.program):
        raise SweepError(f"program: {sweep.program} is not below {Path.cwd()}. Run the sweep from its own folder.")
    try:
        from trimtab_common.locks import free  # imports torch, which the help does without

        from . import runner, study
    except ImportError as error:
        raise SweepError(f'a sweep needs Optuna ({error}): pip install "trimtab-cli[sweeps]"') from None
    for parameter in sweep.varied:
        if parameter.kind.endswith("log_uniform"):
            low, high = sorted((parameter.at(0.0), parameter.at(1.0)))
            print(f"{parameter.name}: the bounds are exponents of e, giving {low:.4g} to {high:.4g}.", file=sys.stderr)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", sweep.name).strip("-.") or "sweep"
    folder = (flags.folder or Path("runs", "sweeps", name)).resolve()
    try:
        record = study.open_study(folder, sweep, seed=flags.seed, sweep_id=flags.sweep_id)
        if flags.retry_failed:
            study.queue_again(record, ["failed"])
        status = runner.Runner(sweep, record, folder, count=count, jobs=flags.jobs, **options).run() if count else 0
    finally:
        free(sweep)
    trials = study.trials_of(record)
    print(f"sweep {record.user_attrs['id']}: {len(trials)} trial(s) in {folder}")
    if flags.report:
        frame = record.trials_dataframe(("number", "value", "user_attrs"))
        frame = frame[frame["number"].isin([trial.number for trial in trials])].drop(
            columns="user_attrs_message", errors="ignore"
        )
        print(frame.sort_values("value", ascending=record.direction.name == "MINIMIZE").to_string(index=False))
    if count and not status and trials and all(study.status_of(trial) == "failed" for trial in trials):
        print("trimtab sweep: error: every trial failed; each said why above.", file=sys.stderr)
        return 1
    return status
