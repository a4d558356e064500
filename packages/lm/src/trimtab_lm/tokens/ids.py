"""Checks the token ids and masks that callers pass to a step."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from trimtab_common.accelerators import moved
from trimtab_lm.interface import Model


def vocabulary_size(model: Model) -> int:
    """The number of token ids that a model can read: the rows of its embedding, also under an adapter."""
    table = cast(Any, model).get_input_embeddings()
    return int(getattr(table, "base_layer", table).num_embeddings)


def check_ids(name: str, column: Sequence[Any], vocab_size: int, *, ignored: int | None = None) -> list[Tensor]:
    """Checks the rows of a list, and returns them on the host.

    Args:
        name: the list's name, for the errors.
        column: the list, which may be empty.
        vocab_size: ids are below it.
        ignored: an id that is allowed too, such as -100 in labels.

    Raises:
        TypeError: a row is no 1-D tensor of integers.
        ValueError: a row is empty, or holds an id that is out of the vocabulary.
    """
    for i, row in enumerate(column):
        if isinstance(row, str):
            raise TypeError(
                f"{name}[{i}] is a text, and token ids are needed. Tokenize it: tokenizer(text, "
                "return_tensors='pt').input_ids[0]; responses come from generate(..., return_prompt=False)."
            )
        if isinstance(row, Tensor) and row.shape == (0,):
            raise ValueError(f"{name}[{i}] is empty. Leave the row out, or give it one token at least (the end token).")
        is_tensor = isinstance(row, Tensor)
        if not is_tensor or row.dim() != 1 or row.is_floating_point() or row.is_complex() or row.dtype == torch.bool:
            came = f"a {row.dtype} tensor of shape {list(row.shape)}" if is_tensor else type(row).__name__
            raise TypeError(
                f"{name}[{i}] must be a 1-D tensor of token ids, got {came}. Use tensor.squeeze(0) for [1, T]."
            )

    rows = moved(column, torch.device("cpu"))
    if not rows:
        return rows
    ids = torch.cat(rows)
    is_wrong = (ids < 0) | (ids >= vocab_size)
    if ignored is not None:
        is_wrong &= ids != ignored
    if bool(is_wrong.any()):
        i = next(i for i, row in enumerate(is_wrong.split(list(map(len, rows)))) if bool(row.any()))
        raise ValueError(
            f"{name}[{i}] holds token ids from {int(rows[i].min())} to {int(rows[i].max())}, the model's "
            f"vocabulary has 0 to {vocab_size - 1}. Use the model's own tokenizer, and cut padding off."
        )
    return rows


def check_labels(ids: Sequence[int], labels: Sequence[int], real: Sequence[bool], *, row: str = "") -> None:
    """Checks the labels of a causal model's row.

    Args:
        real: False at padding, whose labels are not checked.
        row: its place in a list, such as "[3]", for the error.

    Raises:
        ValueError: there are more or fewer labels than ids, or one is neither the token in its place nor -100.
    """
    needed = "A causal model's labels are the tokens in their places: give as many, -100 where a token does not count."
    if len(labels) != len(ids):
        raise ValueError(f"labels{row} has {len(labels)} tokens and input_ids{row} has {len(ids)}. {needed}")
    for place, (token, label, is_real) in enumerate(zip(ids, labels, real, strict=True)):
        if is_real and label not in (-100, token):
            raise ValueError(f"labels{row}[{place}] is {label} and input_ids{row}[{place}] is {token}. {needed}")


def check_tensor(name: str, row: object, of: str) -> Tensor:
    """Returns `row`; TypeError unless it is a tensor of real numbers, which `of` names."""
    if not isinstance(row, Tensor) or row.is_complex():
        came = "a complex tensor" if isinstance(row, Tensor) else type(row).__name__
        raise TypeError(f"{name} must be a 1-D tensor of {of}, got {came}. Use torch.tensor(row).")
    return row


def check_mask(name: str, mask: object, row: Tensor, *, of: str) -> None:
    """TypeError or ValueError unless each token of `row`, whose name is `of`, has a 1 or 0, and one has a 1."""
    mask = check_tensor(name, mask, "ones and zeros")
    if mask.shape != row.shape:
        raise ValueError(
            f"{name} has shape {list(mask.shape)}, its {of} has {list(row.shape)}: give one place for each token, 1 or "
            "0."
        )
    if not bool(((mask == 0) | (mask == 1)).all()) or not bool(mask.any()):
        raise ValueError(f"{name} must hold 1 (counts) and 0 (does not), and a 1 at least.")
