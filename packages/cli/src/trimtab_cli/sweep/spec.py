"""Reads W&B's sweep files, and checks every key; refuses what this tool cannot do."""

import difflib
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, ValidationError

from .distributions import KINDS, Settings

Count = Annotated[StrictInt, Field(ge=1)]
SPELLING = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*$")


class SweepError(ValueError):
    """A sweep that cannot be run as it is written; the message names the key at fault."""


class Section(BaseModel):
    """A mapping of the file; other keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Metric(Section):
    """What is optimized."""

    name: str
    goal: Literal["minimize", "maximize"] = "minimize"
    target: float | None = None
    impute: Literal["worst"] = "worst"
    impute_while_running: Literal["false"] = "false"


class Hyperband(Section):
    """When a run is stopped early: at an iteration, which is a time that it logs the metric."""

    type: Literal["hyperband"]
    min_iter: Count | None = None
    max_iter: Count | None = None
    s: Count | None = None
    eta: Annotated[StrictInt, Field(ge=2)] = 3
    strict: StrictBool = True

    @property
    def rungs(self) -> list[int]:
        """The iterations at which runs are compared, each `eta` times the last."""
        first = self.min_iter or max(1, (self.max_iter or 1) // self.eta ** (self.s or 1))
        return [first * self.eta**n for n in range(40) if first * self.eta**n < (self.max_iter or math.inf)]


@dataclass(frozen=True)
class Parameter:
    """A parameter or a constant: its keys, its distribution, or its list of values."""

    path: tuple[str, ...]
    kind: str
    settings: Settings
    choices: list[Any] | None

    @property
    def name(self) -> str:
        """Its keys, joined by dots."""
        return ".".join(self.path)

    def at(self, u: float) -> Any:
        """The value below which the share `u` of draws lies; u in [0, 1]."""
        return KINDS[self.kind][1](self.settings, u)


class Sweep(Section):
    """A checked sweep file."""

    method: Literal["grid", "random", "bayes"]
    parameters: Mapping[str, Any]
    name: str
    metric: Metric | None = None
    early_terminate: Hyperband | None = None
    command: Annotated[list[Any], Field(min_length=1)] = ["${env}", "${interpreter}", "${program}", "${args}"]
    program: str | None = None
    project: str | None = None
    entity: str | None = None
    description: str | None = None
    run_cap: Count | None = None
    apiVersion: Any = None  # this one and the next two say which part of W&B runs the sweep
    kind: Any = None
    controller: Any = None

    @cached_property
    def all(self) -> list[Parameter]:
        """The parameters, including nested ones."""
        return list(_parameters(self.parameters, (), is_grid=self.method == "grid"))

    @property
    def varied(self) -> list[Parameter]:
        """The parameters that are no constants."""
        return [parameter for parameter in self.all if parameter.kind != "constant"]

    def grid_points(self) -> Iterator[dict[str, int]]:
        """The points of a grid in order: for each parameter, the place of its value."""
        places = itertools.product(*(range(len(parameter.choices or ())) for parameter in self.varied))
        return (dict(zip([parameter.name for parameter in self.varied], point, strict=True)) for point in places)


def read_sweep(path: Path) -> Sweep:
    """The sweep in a YAML file; a SweepError names the file and the key that cannot run here."""
    from trimtab_common.config.values import ConfigError, read_yaml  # imports torch, which the help does without

    try:
        return parse_sweep(read_yaml(path), default_name=path.resolve().parent.name)
    except ConfigError as error:
        raise SweepError(str(error)) from error
    except SweepError as error:
        raise SweepError(f"{path}: {error}") from None


def parse_sweep(source: Any, default_name: str) -> Sweep:
    """The sweep that `source`, a sweep file's content, describes."""
    named = {**source, "name": source.get("name") or default_name} if isinstance(source, dict) else source
    try:
        sweep = Sweep.model_validate(named)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        near = [f" Did you mean {key}?" for key in difflib.get_close_matches(where, Sweep.model_fields, 1)]
        hint = "".join(near) if first["type"] == "extra_forbidden" else ""
        raise SweepError(f"{where}: got {first['input']!r}; {first['msg']}.{hint}") from None
    band = sweep.early_terminate
    for is_missing, message in (
        (sweep.method == "bayes" and not sweep.metric, "metric: missing; method: bayes needs one."),
        (band and not sweep.metric, "metric: missing; early_terminate needs one."),
        (band and not (band.min_iter or (band.max_iter and band.s)), "early_terminate: min_iter, or max_iter with s."),
        ("${program}" in sweep.command and not sweep.program, "program: missing; the command needs it."),
        (sweep.method == "bayes" and not sweep.varied, "parameters: method: bayes needs one that varies."),
        (not sweep.all, "parameters: empty; at least one is needed."),
    ):
        if is_missing:
            raise SweepError(message)
    return sweep


def _parameters(source: Mapping[str, Any], path: tuple[str, ...], *, is_grid: bool) -> Iterator[Parameter]:
    for name, settings in source.items():
        inner = (*path, str(name))
        place = "parameters." + ".parameters.".join(inner)
        if not isinstance(name, str) or not SPELLING.match(name):
            raise SweepError(f"{place}: no name; letters, digits, _ . and -, a letter or _ first, are needed.")
        if not isinstance(settings, dict):
            raise SweepError(f"{place}: got {settings!r}; value, values, or min and max are needed.")
        if settings.keys() == {"parameters"} and isinstance(settings["parameters"], dict):
            yield from _parameters(settings["parameters"], inner, is_grid=is_grid)
        else:
            yield _parameter(inner, place, settings, is_grid=is_grid)


def _parameter(path: tuple[str, ...], place: str, settings: Settings, *, is_grid: bool) -> Parameter:
    kinds = {"value": "constant", "probabilities": "categorical_w_probabilities", "values": "categorical"}
    if not settings.keys() & {*kinds, "min", "max", "distribution"}:
        raise SweepError(f"{place}: got {settings}; value, values, or min and max are needed.")
    if "values" in settings and not (isinstance(settings["values"], list) and settings["values"]):
        raise SweepError(f"{place}.values: got {settings['values']!r}; a list of one value at least is needed.")
    whole = all(type(settings.get(key)) is int for key in ("min", "max"))
    implied = next((kind for key, kind in kinds.items() if key in settings), "int_uniform" if whole else "uniform")
    if (kind := settings.get("distribution", implied)) not in KINDS:
        known = difflib.get_close_matches(str(kind), KINDS, 1) or KINDS
        raise SweepError(f"{place}.distribution: got {kind!r}; known are {', '.join(known)}.")
    defaults, quantile = KINDS[kind]
    full = {**defaults, **{key: value for key, value in settings.items() if key != "distribution"}}
    try:
        if full.keys() != defaults.keys() or ... in full.values():
            raise ValueError(f"{kind} has {', '.join(defaults)}")
        if "min" in full and not full["min"] < full["max"]:
            raise ValueError("min has to be below max")
        quantile(full, 0.0), quantile(full, 1.0)
    except (ValueError, TypeError, ArithmeticError, LookupError) as error:
        raise SweepError(f"{place}: got {settings}; {error}.") from None
    choices = [full["value"]] if kind == "constant" else full["values"] if kind == "categorical" else None
    if is_grid and kind == "int_uniform":
        choices = list(range(full["min"], full["max"] + 1))
    elif is_grid and kind == "q_uniform":  # as W&B's grid, without `max`
        low, q = full["min"], full["q"]
        places = range(math.ceil((full["max"] - low) / q - 1e-9))
        choices = [low + n * q if isinstance(low + q, int) else float(f"{low + n * q:.12g}") for n in places]
    elif is_grid and choices is None:
        raise SweepError(f"{place}: a grid cannot list {kind}. Give it values, or use method: random.")
    return Parameter(path, kind, full, choices)
