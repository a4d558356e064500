"""Converts torch datasets and lists of rows to `datasets`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice
from typing import Any, cast

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from torch import Tensor

from trimtab_lm.interface import Data


def is_stream(dataset: object) -> bool:
    """Whether the rows come one after the other, without numbers."""
    return isinstance(dataset, IterableDataset | torch.utils.data.IterableDataset)


def as_data(dataset: object) -> Data:
    """Converts a torch dataset or stream, or a list of rows, to `datasets`; returns other datasets unchanged.

    Reads a torch dataset at once, and a torch stream row by row during training.

    Raises:
        TypeError: it is not a dataset, or its rows are not dicts that a table can hold.
    """
    if isinstance(dataset, Dataset | IterableDataset | TorchStream):
        return cast(Data, dataset)
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return cast(Data, TorchStream(dataset, partial(map, _plain)))
    if not isinstance(dataset, torch.utils.data.Dataset | list):
        raise TypeError(
            f"The dataset is a {type(dataset).__name__}; a datasets.Dataset or IterableDataset, a torch dataset or a "
            "list of rows is needed. Pass one split of several, or make one: datasets.Dataset.from_list(rows)."
        )
    rows = [_plain(dataset[i]) for i in range(len(dataset))]  # type: ignore[arg-type]
    try:
        return Dataset.from_dict(_columns(rows))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"The rows of the {type(dataset).__name__} do not fit into a table: {error}. Give each column one type, or "
            "pass a data_collator with it, which SFTTrainer and RewardTrainer give the rows as they are."
        ) from error


def rows_in_words(dataset: Any) -> str | None:
    """What is known of training data: its rows and columns; None without data."""
    if dataset is None:
        return None
    count = f"{len(dataset):,} rows" if isinstance(dataset, Dataset | list) else "a stream of rows"
    return f"{count} with the columns {', '.join(dataset.column_names)}" if isinstance(dataset, Dataset) else count


def _plain(row: object) -> dict[str, Any]:
    """Returns a row with tensors and arrays converted to lists."""
    if not isinstance(row, Mapping):
        raise TypeError(
            f"A row of the dataset is a {type(row).__name__}, and a dict of columns is needed, such as "
            "{'text': 'Hello'} or {'input_ids': [5, 6]}. Return dicts from __getitem__ or __iter__."
        )
    return {name: value.tolist() if isinstance(value, Tensor | np.ndarray) else value for name, value in row.items()}


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Returns the columns of all rows, None where a row lacks one."""
    names = {name: None for row in rows for name in row}
    return {name: [row.get(name) for row in rows] for name in names}


class TorchStream(torch.utils.data.IterableDataset[dict[str, Any]]):
    """A torch stream with the methods of `datasets.IterableDataset` that trainers call; it is changed as it is read.

    Args:
        rows: the stream. It is told the epoch if it has `set_epoch`.
        change: from an iterator over its rows to one over the changed rows.
        is_sized: whether `change` keeps the number of rows, so that the length of `rows` holds.
    """

    column_names: None = None

    def __init__(self, rows: Any, change: Callable[[Iterator[Any]], Iterator[Any]], *, is_sized: bool = True):
        self.rows, self.change, self.is_sized = rows, change, is_sized

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.change(iter(self.rows))

    def __len__(self) -> int:
        if not self.is_sized:
            raise TypeError("How many rows a stream has left is not known before it is read. Set max_steps.")
        return len(self.rows)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.rows, "set_epoch"):
            self.rows.set_epoch(epoch)

    def map(
        self,
        function: Callable[..., Mapping[str, Sequence[Any]]],
        *,
        batched: bool,
        batch_size: int,
        remove_columns: Sequence[str],
        with_indices: bool = False,
    ) -> "TorchStream":
        """As of `datasets`; batched=True. A function that gets the rows' numbers returns as many rows as it gets."""

        def change(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
            numbers = count()
            while batch := list(islice(rows, batch_size)):
                columns = _columns(batch)
                made = function(columns, list(islice(numbers, len(batch)))) if with_indices else function(columns)
                made = {name: columns[name] for name in columns if name not in remove_columns} | dict(made)
                yield from (dict(zip(made, values, strict=True)) for values in zip(*made.values(), strict=True))

        return TorchStream(self, change, is_sized=self.is_sized and with_indices)

    def filter(self, is_kept: Callable[[Any], bool]) -> "TorchStream":
        """As of `datasets`."""
        return TorchStream(self, partial(filter, is_kept), is_sized=False)

    def remove_columns(self, names: str | Sequence[str]) -> "TorchStream":
        """As of `datasets`."""
        dropped = {names} if isinstance(names, str) else set(names)

        def change(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
            return ({name: value for name, value in row.items() if name not in dropped} for row in rows)

        return TorchStream(self, change, is_sized=self.is_sized)
