"""Which parameters come next: every point of a grid, draws at random, or Bayesian search."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab_cli.sweep.distributions import Parameter, SweepError
from trimtab_cli.sweep.spec import Metric, Sweep
from trimtab_cli.sweep.store import FAILED, FINISHED, STOPPED, Trial

History = Callable[[Trial], list[float]]  # the finite values of the metric that a trial has logged so far


@dataclass(frozen=True)
class Suggestion:
    """Parameters as runs get them; `point` is their place in the space that Bayesian search works in."""

    parameters: dict[str, Any]
    point: dict[str, Any] = field(default_factory=dict)


def suggest(sweep: Sweep, *, number: int, seed: int, trials: Sequence[Trial], history: History) -> Suggestion | None:
    """The parameters of trial `number`, or None after the grid's last.

    Grid and random ones depend on the number and the seed alone; Bayesian ones on the trials so far too.
    """
    if sweep.method == "grid":
        return _grid(sweep, number)
    if sweep.method == "random":
        return _random(sweep, number, seed)
    return _bayes(sweep, number, seed, trials, history)


def grid_size(sweep: Sweep) -> int:
    """The number of combinations of a grid."""
    size = 1
    for parameter in sweep.parameters:
        size *= len(parameter.grid() or ())
    return size


def nested(parameters: Sequence[Parameter], values: Sequence[Any]) -> dict[str, Any]:
    """{name: value}, where a nested parameter is a mapping of its own."""
    result: dict[str, Any] = {}
    for parameter, value in zip(parameters, values, strict=True):
        place = result
        for key in parameter.path[:-1]:
            place = place.setdefault(key, {})
        place[parameter.path[-1]] = value
    return result


def _grid(sweep: Sweep, number: int) -> Suggestion | None:
    points = itertools.product(*(parameter.grid() or () for parameter in sweep.parameters))
    values = next(itertools.islice(points, number, None), None)
    return None if values is None else Suggestion(nested(sweep.parameters, values))


def _random(sweep: Sweep, number: int, seed: int) -> Suggestion:
    draws = [random.Random(f"{seed}/{number}/{parameter.name}").random() for parameter in sweep.parameters]
    values = [parameter.at(u) for parameter, u in zip(sweep.parameters, draws, strict=True)]
    return Suggestion(nested(sweep.parameters, values))


def _bayes(sweep: Sweep, number: int, seed: int, trials: Sequence[Trial], history: History) -> Suggestion:
    """Optuna's tree-structured Parzen estimator, after ten draws at random.

    TPE rather than a Gaussian process: it takes choices without an order and whole numbers as they are, bears the
    noise of runs that differ by their seed, counts running trials as bad ones nearby (so that several jobs spread
    out), and needs nothing but NumPy. Distributions are searched by their quantiles in [0, 1], as W&B's own search
    does it: what is likely under the distribution is likely at first.
    """
    try:
        import optuna
    except ImportError:
        raise SweepError('method: bayes needs Optuna. Install it: pip install "trimtab-cli[sweeps]"') from None
    assert sweep.metric is not None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space: dict[str, optuna.distributions.BaseDistribution] = {}
    for parameter in sweep.varied:
        if parameter.kind == "categorical":
            choices = range(len(parameter.settings["values"]))
            space[parameter.name] = optuna.distributions.CategoricalDistribution(list(choices))
        elif parameter.kind == "int_uniform":
            low, high = parameter.settings["min"], parameter.settings["max"]
            space[parameter.name] = optuna.distributions.IntDistribution(low, high)
        else:
            space[parameter.name] = optuna.distributions.FloatDistribution(0.0, 1.0)
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=random.Random(f"{seed}/{number}").getrandbits(31), constant_liar=True),
        direction=sweep.metric.goal,
    )
    for trial in trials:
        counted, value = _counts(trial, sweep.metric, trials, history)
        if counted:
            state = optuna.trial.TrialState.RUNNING if value is None else optuna.trial.TrialState.COMPLETE
            study.add_trial(
                optuna.trial.create_trial(state=state, params=trial.point, distributions=space, value=value)
            )
    point = study.ask(space).params
    values = [
        parameter.settings["value"] if parameter.is_constant else _value(parameter, point[parameter.name])
        for parameter in sweep.parameters
    ]
    return Suggestion(nested(sweep.parameters, values), point)


def _value(parameter: Parameter, place: Any) -> Any:
    if parameter.kind == "categorical":
        return parameter.settings["values"][place]
    return place if parameter.kind == "int_uniform" else parameter.at(place)


def _counts(trial: Trial, metric: Metric, trials: Sequence[Trial], history: History) -> tuple[bool, float | None]:
    """Whether the search hears of a trial, and the metric that it counts with; None while it has none."""
    if trial.metric is not None and trial.status in (FINISHED, STOPPED):
        return True, trial.metric
    ended = trial.status in (FINISHED, STOPPED, FAILED)
    how = metric.impute if ended else metric.impute_while_running
    if how == "false":
        return True, None
    value = imputed(how, trial, metric, trials, history)
    return (not ended or value is not None), value


def imputed(how: str, trial: Trial, metric: Metric, trials: Sequence[Trial], history: History) -> float | None:
    """A metric for a trial without one: its latest or best value so far, else the worst of all trials that have one."""
    own = history(trial)
    if own and how == "latest":
        return own[-1]
    if own and how == "best":
        return metric.sign * min(metric.sign * value for value in own)
    known = [other.metric for other in trials if other.metric is not None]
    return metric.sign * max(metric.sign * value for value in known) if known else None
