"""Fields of a configuration: help texts, ranges of values, and their checks."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclasses.dataclass(frozen=True)
class Range:
    """The allowed values of a setting: in words, as a test, and whether they are counts, so that 32.0 becomes 32."""

    words: str
    holds: Callable[[float], bool]
    counts: bool = False


Count = Annotated[int, Range("a whole number of at least 1", lambda value: value >= 1 and value % 1 == 0, True)]
CountFromZero = Annotated[int, Range("a whole number, 0 or above", lambda value: value >= 0 and value % 1 == 0, True)]
Finite = Annotated[float, Range("a finite number", math.isfinite)]
Positive = Annotated[float, Range("a finite number above 0", lambda value: math.isfinite(value) and value > 0)]
NotNegative = Annotated[float, Range("a finite number, 0 or above", lambda value: math.isfinite(value) and value >= 0)]
Share = Annotated[float, Range("a number above 0 and up to 1", lambda value: 0 < value <= 1)]
Decay = Annotated[float, Range("a number from 0 to below 1", lambda value: 0 <= value < 1)]
Fraction = Annotated[float, Range("a number from 0 to 1", lambda value: 0 <= value <= 1)]
Seed = Annotated[int, Range("in [0, 2**32), the range that NumPy takes", lambda value: 0 <= value < 2**32)]


class Computed(str):
    """The help of a field without a flag. transformers' HfArgumentParser accepts only argparse's metadata."""


def setting(text: str, **default: Any) -> Any:
    """A field of a configuration with its line of help; `default` or `default_factory` as for dataclasses.field."""
    return dataclasses.field(**default, metadata={"help": text})


def computed(text: str) -> Any:
    """A field without a flag that is computed from other fields or by a trainer; None until then."""
    return dataclasses.field(default=None, metadata={"help": Computed(text)})


def check_ranges(config: DataclassInstance, inherited: Mapping[str, object] = MappingProxyType({})) -> None:
    """Raises ValueError for the first field whose value is outside the range that its annotation names.

    None is in the range of a field that is annotated with it, such as Count | None. A count that is a float, such as
    64 / 2, becomes an int.

    Args:
        inherited: annotations such as Count of fields that another library's class declares.
    """
    hints = {**typing.get_type_hints(type(config), include_extras=True), **inherited}
    for field in dataclasses.fields(config):
        within, value = _range_of(hints[field.name]), getattr(config, field.name)
        is_absent = value is None and type(None) in typing.get_args(hints[field.name])
        is_number = isinstance(value, typing.SupportsFloat)
        if within is not None and not is_absent and not (is_number and within.holds(value)):
            raise ValueError(f"{field.name}={value if is_number else repr(value)} must be {within.words}.")
        if within is not None and within.counts and isinstance(value, float):
            object.__setattr__(config, field.name, int(value))  # the config may be frozen


def _range_of(hint: object) -> Range | None:
    """The range of an annotation: of Count, or of Count | None."""
    inside = [part if isinstance(part, Range) else _range_of(part) for part in typing.get_args(hint)]
    return next((part for part in inside if part is not None), None)


def script_name() -> str:
    """The running script's file name without its ending, as a default name of runs."""
    return Path(sys.argv[0]).stem or "interactive"


def short_name(kind: type) -> str:
    """PPOConfig -> ppo, IterativeSFTConfig -> iterative_sft."""
    stem = re.sub(r"(Config|Arguments)$", "", kind.__name__) or kind.__name__
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", stem).lower()
