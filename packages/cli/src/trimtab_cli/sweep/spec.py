"""A sweep file of W&B's, read and checked key by key; what this tool cannot do is refused, never passed over."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trimtab_cli.sweep.distributions import KINDS, Check, Parameter, SweepError, number, positive, whole

DEFAULT_COMMAND = ["${env}", "${interpreter}", "${program}", "${args}"]
TEXTS = ("name", "description", "project", "entity", "program")
IGNORED = ("apiVersion", "kind", "controller")  # they say which part of W&B runs the sweep
ELSEWHERE = {
    "job": "a Launch job needs W&B's server",
    "image_uri": "a Launch job needs W&B's server",
    "scheduler": "W&B's own scheduler needs its server; `method: bayes` is what runs here",
    "metrics": "one `metric` is optimized",
}
KEYS = (*TEXTS, *IGNORED, *ELSEWHERE, "method", "metric", "parameters", "command", "early_terminate", "run_cap")
SPELLING = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*$")


@dataclass(frozen=True)
class Metric:
    """What is optimized, and what a run counts that has not reported it."""

    name: str
    goal: Literal["minimize", "maximize"] = "minimize"
    target: float | None = None
    impute: str = "worst"
    impute_while_running: str = "false"

    @property
    def sign(self) -> float:
        """1 where less is better."""
        return 1.0 if self.goal == "minimize" else -1.0

    def reached(self, value: float) -> bool:
        """Whether a value is as good as the target."""
        return self.target is not None and self.sign * value <= self.sign * self.target


@dataclass(frozen=True)
class Hyperband:
    """When a run is stopped early; see hyperband.py."""

    min_iter: int | None = None
    max_iter: int | None = None
    s: int | None = None
    eta: float = 3.0
    strict: bool = True


@dataclass(frozen=True)
class Sweep:
    """A checked sweep file."""

    source: Mapping[str, Any]
    name: str
    method: str
    command: list[Any]
    parameters: list[Parameter]
    metric: Metric | None
    early_terminate: Hyperband | None

    def get(self, key: str) -> Any:
        """A key of the file that needs no more than its check: program, project, entity, run_cap, description."""
        return self.source.get(key)

    @property
    def varied(self) -> list[Parameter]:
        """The parameters that are no constants."""
        return [parameter for parameter in self.parameters if not parameter.is_constant]


def read_sweep(path: Path) -> Sweep:
    """The sweep in a YAML file; SweepError, with the file and the key, where it is no sweep that runs here."""
    from trimtab_common.config.values import ConfigError, read_yaml  # imports torch, which the help does without

    try:
        source = read_yaml(path)
    except ConfigError as error:
        raise SweepError(str(error)) from error
    try:
        return parse_sweep(source, default_name=path.resolve().parent.name)
    except SweepError as error:
        raise SweepError(f"{path}: {error}") from None


def parse_sweep(source: Any, default_name: str) -> Sweep:
    """The sweep that `source`, a sweep file's content, describes."""
    _mapping("the file", source)
    _known("", source, KEYS)
    for key, reason in ELSEWHERE.items():
        if key in source:
            raise SweepError(f"{key}: cannot be run here, {reason}.")
    for key in TEXTS:
        if key in source and not isinstance(source[key], str):
            raise SweepError(f"{key}: got {source[key]!r}; text is needed.")
    method = _choice("method", source.get("method"), ("grid", "random", "bayes"))
    if "run_cap" in source:
        _check("run_cap", source["run_cap"], lambda value: whole(value) or positive(value))
    if "parameters" not in source:
        raise SweepError("parameters: missing; a sweep needs at least one.")
    sweep = Sweep(
        source=source,
        name=source.get("name") or default_name,
        method=method,
        command=_command(source),
        parameters=list(_parameters(source["parameters"], ())),
        metric=_metric(source["metric"]) if "metric" in source else None,
        early_terminate=_hyperband(source["early_terminate"]) if "early_terminate" in source else None,
    )
    _check_together(sweep)
    return sweep


def _check_together(sweep: Sweep) -> None:
    for key, used in (("method: bayes", sweep.method == "bayes"), ("early_terminate", sweep.early_terminate)):
        if used and sweep.metric is None:
            raise SweepError(f"metric: missing; {key} needs one.")
    if sweep.method == "bayes" and not sweep.varied:
        raise SweepError("parameters: every one is a constant; method: bayes needs one that varies.")
    for parameter in sweep.parameters if sweep.method == "grid" else ():
        if parameter.grid() is None:
            raise SweepError(
                f"{_place(parameter.path)}: a grid cannot list {parameter.kind}. "
                "Give it values or int_uniform or q_uniform bounds, or use method: random."
            )


def _parameters(source: Any, path: tuple[str, ...]) -> Iterator[Parameter]:
    _mapping(_place(path) if path else "parameters", source)
    if not source:
        raise SweepError(f"{_place(path) if path else 'parameters'}: empty; at least one parameter is needed.")
    for name, settings in source.items():
        inner = (*path, str(name))
        if not isinstance(name, str) or not SPELLING.match(name):
            raise SweepError(
                f"{_place(inner)}: not a name; letters, digits, _ . and - are allowed, a letter or _ first."
            )
        _mapping(_place(inner), settings)
        if "parameters" in settings:
            _known(_place(inner), settings, ("parameters",))
            yield from _parameters(settings["parameters"], inner)
        else:
            yield _parameter(inner, settings)


def _parameter(path: tuple[str, ...], settings: Mapping[str, Any]) -> Parameter:
    place = _place(path)
    name = settings["distribution"] if "distribution" in settings else _implied(place, settings)
    kind = KINDS[_choice(f"{place}.distribution", name, tuple(KINDS))]
    _known(place, settings, (*kind.needs, *kind.may, "distribution"))
    for key, check in kind.needs.items():
        if key not in settings:
            raise SweepError(f"{place}.{key}: missing; {name} needs it.")
        _check(f"{place}.{key}", settings[key], check)
    full = {key: settings.get(key, default) for key, (_, default) in kind.may.items()}
    for key, (check, _) in kind.may.items():
        _check(f"{place}.{key}", full[key], check)
    full |= {key: settings[key] for key in kind.needs}
    if "min" in full and full["min"] >= full["max"]:
        raise SweepError(f"{place}.min: got {full['min']!r}, which is not below max, {full['max']!r}.")
    if "probabilities" in full and len(full["probabilities"]) != len(full["values"]):
        raise SweepError(
            f"{place}.probabilities: {len(full['probabilities'])} for {len(full['values'])} values; one each is needed."
        )
    return Parameter(path, name, full)


def _implied(place: str, settings: Mapping[str, Any]) -> str:
    """The distribution that W&B takes where none is named."""
    if "value" in settings:
        return "constant"
    if "values" in settings:
        return "categorical_w_probabilities" if "probabilities" in settings else "categorical"
    if "min" in settings and "max" in settings:
        return "uniform" if any(whole(settings[key]) for key in ("min", "max")) else "int_uniform"
    if "min" in settings or "max" in settings:
        raise SweepError(f"{place}.{'max' if 'min' in settings else 'min'}: missing; both bounds are needed.")
    raise SweepError(f"{place}: got {dict(settings)!r}; value, values, min and max, or a distribution is needed.")


def _metric(source: Any) -> Metric:
    _mapping("metric", source)
    _known("metric", source, Metric.__dataclass_fields__)
    if not isinstance(source.get("name"), str):
        raise SweepError(f"metric.name: got {source.get('name')!r}; the name of what runs log is needed.")
    _choice("metric.goal", source.get("goal", "minimize"), ("minimize", "maximize"))
    _choice("metric.impute", source.get("impute", "worst"), ("latest", "best", "worst"))
    while_running = source.get("impute_while_running", "false")
    _choice("metric.impute_while_running", while_running, ("latest", "best", "worst", "false"))
    if "target" in source:
        _check("metric.target", source["target"], number)
    return Metric(**source)


def _hyperband(source: Any) -> Hyperband:
    _mapping("early_terminate", source)
    _known("early_terminate", source, ("type", *Hyperband.__dataclass_fields__))
    _choice("early_terminate.type", source.get("type"), ("hyperband",))
    for key in ("min_iter", "max_iter", "s"):
        if key in source:
            _check(f"early_terminate.{key}", source[key], lambda value: whole(value) or positive(value))
    _check("early_terminate.eta", source.get("eta", 3), positive)
    if source.get("eta", 3) <= 1:
        raise SweepError(f"early_terminate.eta: got {source['eta']!r}; a number above 1 is needed.")
    if not isinstance(source.get("strict", True), bool):
        raise SweepError(f"early_terminate.strict: got {source['strict']!r}; true or false is needed.")
    if ("max_iter" in source) != ("s" in source) or not {"min_iter", "max_iter"} & source.keys():
        raise SweepError("early_terminate: min_iter is needed, or max_iter with s.")
    if "max_iter" in source and source["max_iter"] / source.get("eta", 3) < 1:
        raise SweepError(f"early_terminate.max_iter: got {source['max_iter']}; no bracket fits below it with this eta.")
    return Hyperband(**{key: value for key, value in source.items() if key != "type"})


def _command(source: Mapping[str, Any]) -> list[Any]:
    command = source.get("command", DEFAULT_COMMAND)
    if not isinstance(command, list) or not command:
        raise SweepError(f"command: got {command!r}; a list of words and macros is needed.")
    if "${program}" in command and "program" not in source:
        raise SweepError("program: missing; the command needs it.")
    return command


def _mapping(place: str, value: object) -> None:
    if not isinstance(value, dict):
        raise SweepError(f"{place}: got {value!r}; lines of `name: value` are needed.")


def _known(place: str, source: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in source:
        if name not in names:
            near = difflib.get_close_matches(str(name), list(names), 1)
            where = f"{place}.{name}" if place else str(name)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}."
            raise SweepError(f"{where}: unknown key; {hint}")


def _choice(place: str, value: object, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        near = difflib.get_close_matches(str(value), choices, 1)
        raise SweepError(
            f"{place}: got {value!r}; {'did you mean ' + near[0] if near else 'one of ' + ', '.join(choices)}."
        )
    return value


def _check(place: str, value: object, check: Check) -> None:
    if problem := check(value):
        raise SweepError(f"{place}: got {value!r}; {problem}.")


def _place(path: tuple[str, ...]) -> str:
    return "parameters." + ".parameters.".join(path)
