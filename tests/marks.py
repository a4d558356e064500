"""Marks for parametrized tests."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(names: Iterable[Any], *quick: Any) -> list[Any]:
    """Returns a test's cases; all but the `quick` ones are marked slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
