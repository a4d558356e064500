"""Compares trees of dicts, lists, tensors and plain values, bit for bit."""

import torch


def tree_difference(one: object, other: object, where: str = "") -> str:
    """Returns where two trees differ first, and how; empty if they are equal. NaN differs from itself."""
    if type(one) is not type(other):
        return f"{where}: {type(one).__name__}, {type(other).__name__}"
    match one, other:
        case torch.Tensor(), torch.Tensor():
            return "" if torch.equal(one, other) else f"{where}: tensors differ"
        case dict(), dict():
            if one.keys() != other.keys():
                return f"{where}: only one has {', '.join(map(str, sorted(one.keys() ^ other.keys(), key=str)[:4]))}"
            pairs = [(f"{where}/{key}", one[key], other[key]) for key in one]
        case (list() | tuple(), list() | tuple()):
            if len(one) != len(other):
                return f"{where}: {len(one)} and {len(other)} entries"
            pairs = [(f"{where}/{i}", *pair) for i, pair in enumerate(zip(one, other, strict=True))]
        case _:
            return "" if one == other else f"{where}: {one}, {other}"
    return next(filter(None, (tree_difference(a, b, place) for place, a, b in pairs)), "")
