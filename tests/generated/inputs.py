"""Generates numbers, masks, texts and values of wrong types; and recognizes the project's own errors."""

import math
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

PYTHONS = re.compile(
    "not supported between|object is not|has no attribute|operand type|unexpected keyword|argument must be"
)
PACKAGES = Path(__file__).resolve().parents[2] / "packages"
DOUBLE = torch.float64

reasonable = st.floats(-50, 50, allow_nan=False, width=32)
logprob = st.floats(-60, 0, allow_nan=False, width=32)
any_float = st.floats(allow_nan=True, allow_infinity=True)
odd_text = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("a b.\n\t\0\u200b\u0301\ufeff\U0001f600é中</s><pad>"),
        st.characters(exclude_categories=["Cs"], min_codepoint=0x300, max_codepoint=0x36F),
    ),
    max_size=30,
)
scalar = st.one_of(
    st.none(), st.booleans(), st.integers(), any_float, odd_text, st.binary(max_size=3), st.complex_numbers()
)
anything = st.recursive(
    scalar,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(odd_text, inner, max_size=3), st.tuples(inner, inner)
    ),
    max_leaves=5,
)


@st.composite
def table(draw: Any, *, columns: int = 1, numbers: Any = reasonable, rows: int = 4, width: int = 6) -> Any:
    """Draws `columns` tensors [B, R] in float64, and a mask with at least one 1 in each row."""
    shape = draw(st.integers(1, rows)), draw(st.integers(1, width))
    count = shape[0] * shape[1]
    tensors = [
        torch.tensor(draw(st.lists(numbers, min_size=count, max_size=count)), dtype=DOUBLE).view(shape)
        for _ in range(columns)
    ]
    mask = torch.tensor(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))).view(shape)
    certain = draw(st.lists(st.integers(0, shape[1] - 1), min_size=shape[0], max_size=shape[0]))
    mask[torch.arange(shape[0]), torch.tensor(certain)] = 1
    return *tensors, mask


def vectors(columns: int, *, numbers: Any = reasonable, least: int = 1, most: int = 8) -> Any:
    """Draws `columns` tensors [N] in float64."""
    row = st.tuples(*[numbers] * columns)
    lists = st.lists(row, min_size=least, max_size=most)
    return lists.map(lambda rows: tuple(torch.tensor(rows, dtype=DOUBLE).view(-1, columns).T.unbind()))


def close(one: Tensor | float, other: Tensor | float, *, rel: float = 1e-6, abs_: float = 1e-8) -> None:
    """Asserts that the values are equal up to rounding, and not NaN."""
    torch.testing.assert_close(
        torch.as_tensor(one, dtype=DOUBLE), torch.as_tensor(other, dtype=DOUBLE), rtol=rel, atol=abs_
    )


def is_finite(value: Tensor | float) -> bool:
    return bool(value.isfinite().all()) if isinstance(value, Tensor) else math.isfinite(value)


def result_or_our_error(call: Callable[[], Any]) -> Any:
    """Returns the call's result, or its error, which must be ours: raised in the packages, with a full sentence.

    Raises:
        AssertionError: the error comes from elsewhere, or says too little.
    """
    try:
        return call()
    except (ValueError, TypeError, RuntimeError) as raised:
        error = raised
    last = traceback.extract_tb(error.__traceback__)[-1]
    assert Path(last.filename).is_relative_to(PACKAGES), f"{type(error).__name__} of {last.filename}: {error}"
    assert len(str(error)) > 20, str(error)
    assert not PYTHONS.search(str(error)), str(error)
    return error
