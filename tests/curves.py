"""Compares recorded curves: a refactor shows the same numbers, a change of behaviour shows different ones.

`tests/golden/<name>.json` holds what `curve` returned when it was recorded. After an intended change,
`python -m <module of the test>` records it again; the commit must say so.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "golden"
Curve = Mapping[str, Sequence[float]]


def assert_recorded(name: str, curve: Curve, *, rel: float = 1e-5) -> None:
    """Asserts that the curve has the recorded statistics, each within a relative error of `rel`."""
    recorded = json.loads((FOLDER / f"{name}.json").read_text())
    assert set(curve) == set(recorded)
    for key, values in recorded.items():
        assert curve[key] == pytest.approx(values, rel=rel, abs=1e-7), key


def record(curves: Mapping[str, Callable[[], Curve]]) -> None:
    """Writes every curve to its file."""
    for name, curve in curves.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(curve(), indent=1) + "\n")
