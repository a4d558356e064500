"""Trials in the order of their metric as a table, and each parameter against it as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trimtab_cli.sweep.distributions import SweepError
from trimtab_cli.sweep.runner import value_of
from trimtab_cli.sweep.spec import Metric, Sweep
from trimtab_cli.sweep.store import FAILED, FINISHED, STOPPED, Store, Trial

FIGURE = "report.png"


def ranked(trials: Sequence[Trial], metric: Metric | None) -> list[Trial]:
    """Finished trials, the best first; without a metric in the order they were started."""
    done = [trial for trial in trials if trial.status == FINISHED]
    if metric is None:
        return done
    return sorted(done, key=lambda trial: metric.sign * trial.metric if trial.metric is not None else float("inf"))


def table(sweep: Sweep, trials: Sequence[Trial]) -> str:
    """Ranked trials, then those that were stopped, as aligned columns, and what became of the others in one line."""
    stopped = [trial for trial in trials if trial.status == STOPPED]
    names = [parameter.name for parameter in sweep.varied]
    rows = [["rank", "trial", "run", sweep.metric.name if sweep.metric else "metric", "seconds", *names]]
    for rank, trial in enumerate([*ranked(trials, sweep.metric), *stopped], start=1):
        place = str(rank) if trial.status == FINISHED else "stopped"
        values = [shown(value_of(trial, parameter.path)) for parameter in sweep.varied]
        rows.append([place, str(trial.number), trial.run_id, shown(trial.metric), shown(trial.seconds), *values])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    for trial in trials:
        if trial.status == FAILED:
            cause, *log = trial.message.splitlines()
            lines.append(f"trial {trial.number} failed: {cause}{' ' + log[-1] if log else ''} ({trial.log})")
    return "\n".join(lines)


def shown(value: object) -> str:
    """A cell of the table."""
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def draw(sweep: Sweep, store: Store) -> Path | None:
    """report.png in the sweep's folder; None where nothing has both a metric and a parameter that varies."""
    done = ranked(store.trials, sweep.metric)
    stopped = [trial for trial in store.trials if trial.status == STOPPED and trial.metric is not None]
    if sweep.metric is None or not sweep.varied or not done:
        return None
    try:
        import matplotlib
    except ImportError:
        raise SweepError('--report needs matplotlib. Install it: pip install "trimtab-cli[sweeps]"') from None
    matplotlib.use("Agg")  # files only: the machine may have no display
    from matplotlib import pyplot as plt

    columns = min(len(sweep.varied), 4)
    lines = -(-len(sweep.varied) // columns)
    size = (3.6 * columns, 3.0 * lines)
    figure, axes = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False, sharey=True)
    for axis, parameter in zip(axes.flat, sweep.varied, strict=False):
        groups = [(stopped, "tab:gray", "x", "stopped early"), (done, "tab:blue", "o", "finished")]
        groups.append((done[:1], "tab:red", "o", "best"))
        values = {id(trial): value_of(trial, parameter.path) for trial in [*done, *stopped]}
        is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values.values())
        ordered = sorted({str(value) for value in values.values()})
        for trials, color, marker, label in (group for group in groups if group[0]):
            x = [values[id(trial)] if is_number else ordered.index(str(values[id(trial)])) for trial in trials]
            axis.scatter(x, [trial.metric for trial in trials], c=color, marker=marker, s=22, label=label)
        if not is_number:
            axis.set_xticks(range(len(ordered)), [text[:16] for text in ordered])
        elif "log" in parameter.kind:
            axis.set_xscale("log")
        axis.set_xlabel(parameter.name)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(sweep.varied) :]:
        axis.set_visible(False)
    for row in axes:
        row[0].set_ylabel(sweep.metric.name)
    axes.flat[0].legend(fontsize=7, frameon=False)
    figure.suptitle(f"{sweep.name}: {len(done)} finished, {len(stopped)} stopped early", fontsize=10)
    path = store.folder / FIGURE
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
