"""The record of a sweep: an Optuna study in the sweep's folder, with each trial's parameters and results."""

import itertools
import random
import secrets
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from trimtab_common.locks import hold
from trimtab_common.sealing import CheckpointError

from .spec import Parameter, Sweep, SweepError

JOURNAL = "journal.log"
SAME = {"method", "metric", "parameters", "program", "command", "early_terminate"}
"""What makes it the same sweep; the rest of the file may change between two calls."""


def open_study(folder: Path, sweep: Sweep, *, seed: int | None, sweep_id: str | None) -> optuna.Study:
    """The study of a sweep; locks its folder against other processes until `locks.free(sweep)`.

    Raises:
        SweepError: another process runs the sweep, or the folder holds another one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        hold(folder, sweep)
    except CheckpointError as error:
        raise SweepError(str(error)) from None
    (folder / f"{JOURNAL}.lock").unlink(missing_ok=True)  # Optuna's own, which a kill leaves there
    study = new_study(sweep, storage_in(folder))
    config = sweep.model_dump(include=SAME)
    if "config" not in study.user_attrs:
        for name, value in {"id": sweep_id or secrets.token_hex(4), "seed": seed or 0, "config": config}.items():
            study.set_user_attr(name, value)
    about = study.user_attrs
    changed = sorted(key for key in SAME if about["config"][key] != config[key])
    changed += ["--seed"] if seed not in (None, about["seed"]) else []
    changed += ["--sweep-id"] if sweep_id not in (None, about["id"]) else []
    if changed:
        raise SweepError(
            f"{folder} holds a sweep that differs in {', '.join(changed)}. Undo the change to go on with it, "
            "or give this sweep another `name` or --folder."
        )
    return study


def new_study(sweep: Sweep, storage: optuna.storages.BaseStorage | None = None) -> optuna.Study:
    """The study of a sweep in a storage, or in memory."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if band := sweep.early_terminate:
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=band.rungs[0], reduction_factor=band.eta)
    goal = sweep.metric.goal if sweep.metric else "minimize"
    return optuna.create_study(storage=storage, study_name="s", direction=goal, pruner=pruner, load_if_exists=True)


def read_study(folder: Path) -> optuna.Study:
    """The study of a sweep that has run; SweepError if it has not started its first trial."""
    if (folder / JOURNAL).is_file():
        with suppress(KeyError):  # a kill leaves a journal without the study
            study = optuna.load_study(study_name="s", storage=storage_in(folder))
            if "config" in study.user_attrs:
                return study
    raise SweepError(f"{folder} holds no sweep that has begun. Run `trimtab sweep` with it as --folder.")


def storage_in(folder: Path) -> optuna.storages.JournalStorage:
    """The storage of a sweep's folder."""
    return optuna.storages.JournalStorage(JournalFileBackend(str(folder / JOURNAL)))


def trials_of(study: optuna.Study) -> list[FrozenTrial]:
    """The trials that were started, without those that were run again."""
    trials = study.get_trials(deepcopy=False, states=[state for state in TrialState if state != TrialState.WAITING])
    again = {trial.user_attrs.get("again") for trial in trials}
    return [trial for trial in trials if trial.number not in again]


def status_of(trial: FrozenTrial) -> str:
    """running, interrupted (to be run again), finished, stopped early, or failed."""
    return str(trial.user_attrs.get("status", "interrupted" if trial.state == TrialState.FAIL else "running"))


def queue_again(study: optuna.Study, statuses: Collection[str]) -> None:
    """Queue the trials of these statuses, to be run again before others."""
    queued = {trial.user_attrs.get("again") for trial in study.get_trials(deepcopy=False)}
    for trial in trials_of(study):
        if status_of(trial) in statuses and trial.number not in queued:
            point = trial.user_attrs.get("point") or trial.params
            study.enqueue_trial(point, user_attrs={"again": trial.number, "point": point})


def next_trial(sweep: Sweep, study: optuna.Study, *, seed: int, count: float) -> optuna.Trial | None:
    """A queued trial, else a new one, with its parameters; None where there are `count` or the grid is at its end.

    Of grids and random sweeps, trial n depends on n and the seed alone.
    """
    trials = study.get_trials(deepcopy=False)
    number = sum("again" not in trial.user_attrs for trial in trials)
    if all(trial.state != TrialState.WAITING for trial in trials):
        point = next(itertools.islice(sweep.grid_points(), number, None), None) if sweep.method == "grid" else {}
        if number >= count or point is None:
            return None
        study.enqueue_trial(point, user_attrs={"point": point})
    draws = random.Random(f"{seed}/{number}").getrandbits(31)
    sampler = optuna.samplers.TPESampler if sweep.method == "bayes" else optuna.samplers.RandomSampler
    study.sampler = sampler(seed=draws)
    trial = study.ask({parameter.name: _space(parameter) for parameter in sweep.varied})
    trial.set_user_attr("parameters", parameters_at(sweep, trial.params))
    return trial


def parameters_at(sweep: Sweep, point: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters at a point of the search space; nested ones are in mappings of their own."""
    parameters: dict[str, Any] = {}
    for parameter in sweep.all:
        place, inner = point.get(parameter.name, 0), parameters
        for key in parameter.path[:-1]:
            inner = inner.setdefault(key, {})
        if parameter.choices is None and parameter.kind != "int_uniform":
            place = parameter.at(place)
        inner[parameter.path[-1]] = place if parameter.choices is None else parameter.choices[place]
    return parameters


def _space(parameter: Parameter) -> BaseDistribution:
    """Where Optuna searches: places of values, whole numbers, or the quantiles of a distribution, as W&B's search."""
    if parameter.choices is not None:
        return CategoricalDistribution(range(len(parameter.choices)))
    if parameter.kind == "int_uniform":
        return IntDistribution(parameter.settings["min"], parameter.settings["max"])
    return FloatDistribution(0.0, 1.0)
