"""Recorded curves: a refactor shows the same numbers, a change of behaviour other ones.

`tests/golden/<name>.json` holds what `curve` returned when it was recorded. After a change that is meant,
`python -m <module of the test>` records it again; say so in the commit.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "golden"
Curve = Mapping[str, Sequence[float]]


def assert_recorded(name: str, curve: Curve, *, rel: float = 1e-5) -> None:
    """The curve has the recorded statistics, each within `rel` of its size."""
    recorded = json.loads((FOLDER / f"{name}.json").read_text())
    assert set(curve) == set(recorded)
    for key, values in recorded.items():
        assert curve[key] == pytest.approx(values, rel=rel, abs=1e-7), key


def record(curves: Mapping[str, Callable[[], Curve]]) -> None:
    """Write every curve to its file."""
    for name, curve in curves.items():
        (FOLDER / f"{name}.json").write_text(json.dumps(curve(), indent=1) + "\n")
