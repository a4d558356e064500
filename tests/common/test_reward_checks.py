"""A reward function must return a number for each item; otherwise an error says how to fix it."""

import itertools
import re
from fractions import Fraction

import numpy as np
import pytest
import torch

from trimtab_common.reward_checks import checked_scores

ITEMS = ["the first", "the second", "the third"]
SOURCE = "What f returned"


def scores(result, **options):
    return checked_scores(result, ITEMS, source=SOURCE, **options)


@pytest.mark.parametrize(
    "result",
    [
        [1, 0, 2],
        (1.0, 0.0, 2.0),
        (x for x in (1, 0, 2)),
        [True, False, 2],
        [np.float16(1), np.bool_(False), np.int64(2)],
        [torch.tensor(1.0), torch.tensor([0.0]), torch.tensor([[2]])],
        [Fraction(1), 0, 2],
        np.array([1, 0, 2], dtype=np.int64),
        np.array([[1], [0], [2]]),
        torch.tensor([1, 0, 2]),
        torch.tensor([1.0, 0.0, 2.0], dtype=torch.bfloat16, requires_grad=True),
        torch.tensor([[1.0], [0.0], [2.0]]),
        torch.tensor([1.0, 0.0, 2.0]).expand(3, 3)[0],
    ],
)
def test_numbers_of_any_kind_are_taken(result):
    assert scores(result) == [1.0, 0.0, 2.0]


def test_an_entry_may_be_missing_only_where_it_may():
    missing = scores([1.0, None, 2.0], may_abstain=True)
    assert (missing[0], missing[2]) == (1.0, 2.0)
    assert missing[1] != missing[1]
    with pytest.raises(TypeError, match=r"has None \(NoneType\) for the second"):
        scores([1.0, None, 2.0])


BAD = {
    "nothing": (None, TypeError, "is None (NoneType)"),
    "a text": ("123", TypeError, "is '123' (str)"),
    "a dict": ({"a": 1, "b": 2, "c": 3}, TypeError, "is {'a': 1, 'b': 2, 'c': 3} (dict)"),
    "a set": ({1, 2, 3}, TypeError, "is {1, 2, 3} (set)"),
    "a generator without end": (itertools.count(), ValueError, "has 4 scores for 3 items"),
    "a generator of texts": ((str(x) for x in range(3)), TypeError, "has '0' (str) for the first"),
    "a number": (1.0, TypeError, "is 1.0 (float)"),
    "a tensor without axes": (torch.tensor(1.0), ValueError, "is a Tensor of shape [] and type torch.float32"),
    "a tensor of rows": (torch.zeros(3, 2), ValueError, "is a Tensor of shape [3, 2]"),
    "a row": (torch.zeros(1, 3), ValueError, "is a Tensor of shape [1, 3]"),
    "an array of rows": (np.zeros((3, 2)), ValueError, "is a ndarray of shape [3, 2]"),
    "a tensor without numbers": (torch.zeros(3, device="meta"), TypeError, "is a tensor on the device 'meta'"),
    "too few": ([1.0, 2.0], ValueError, "has 2 scores for 3 items"),
    "too many": (torch.zeros(4), ValueError, "has 4 scores for 3 items"),
    "none at all": ([], ValueError, "has 0 scores for 3 items"),
    "lists": ([[1.0], [2.0], [3.0]], TypeError, "has [1.0] (list) for the first"),
    "texts": ([1, "2", 3], TypeError, "has '2' (str) for the second"),
    "a complex number": ([1, 2, 3j], TypeError, "has 3j (complex) for the third"),
    "complex numbers": (torch.zeros(3, dtype=torch.complex64), TypeError, "has 0j (complex) for the first"),
    "two numbers": (
        [1, 2, torch.zeros(2)],
        TypeError,
        "has a Tensor of shape [2] and type torch.float32 for the third",
    ),
    "texts of NumPy": (np.array(["1", "2", "3"]), TypeError, "has '1' (str) for the first"),
    "not a number": ([1.0, float("nan"), 3.0], ValueError, "has nan for the second: a score must be a finite number"),
    "several": (torch.tensor([torch.inf, 1, -torch.inf]), ValueError, "has inf for the first, -inf for the third: "),
    "beyond float32": ([1.0, 2.0, 1e39], ValueError, "has 1e+39 for the third"),
    "beyond any float": ([10**5000, 2.0, 3.0], ValueError, "has inf for the first"),
}


@pytest.mark.parametrize("what", BAD)
def test_anything_else_is_refused_with_what_came_what_is_needed_and_what_to_do(what):
    result, error, came = BAD[what]
    with pytest.raises(error) as caught:
        scores(result)
    text = str(caught.value)
    assert text.startswith(f"{SOURCE} {came}")
    assert re.search("3 numbers is needed|finite number of float32|holds no numbers", text)
    assert re.search(r"Use a |Score each item|Convert it|Compute it|fix the reward", text)
    assert len(text) < 400
