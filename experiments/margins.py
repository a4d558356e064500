"""The smallest effects that matter, from margins.yaml."""

from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("margins.yaml")


@dataclass(frozen=True)
class Margin:
    """The smallest effect on a quantity that matters.

    Attributes:
        margin: The size, above 0, in the unit.
        unit: What the quantity is measured in.
        fixed: The day on which it was chosen.
        meaning: The size in words, such as a share of the observed spread.
    """

    margin: float
    unit: str
    fixed: date
    meaning: str


@cache
def margins(paper: str) -> dict[str, Margin]:
    """The margins of a paper by quantity.

    Args:
        paper: The name of the paper's folder.
    """
    content: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    if paper not in content:
        raise ValueError(f"{FILE.name} has no margins for {paper!r}. Add them before its runs are judged.")
    return {quantity: Margin(**row) for quantity, row in content[paper].items()}


def margin_fields(paper: str, quantity: str) -> dict[str, Any]:
    """The fields `matters` and `unit` of a claim about a quantity."""
    margin = margins(paper)[quantity]
    return {"matters": margin.margin, "unit": margin.unit}
