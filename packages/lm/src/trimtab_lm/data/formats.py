"""Rows of a dataset: which of the documented formats they have, their parts, and mapping a function over them."""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from itertools import takewhile
from typing import Any, TypeVar

import datasets
from datasets import Dataset, IterableDataset

Conversation = Sequence[Mapping[str, Any]]
"""Messages of a role and a content."""

Row = Mapping[str, Any]

T = TypeVar("T")

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


class RowFormat(StrEnum):
    """What a dataset's rows are, by their columns."""

    TEXT = "text"
    MESSAGES = "messages"
    PROMPT_COMPLETION = "prompt-completion"
    TOKENIZED = "tokenized"
    PREFERENCE = "preference"
    IMPLICIT_PREFERENCE = "implicit-prompt preference"
    TOKENIZED_PREFERENCE = "tokenized preference"
    PROMPT = "prompt"


COLUMN_SETS: dict[RowFormat, tuple[tuple[str, ...], ...]] = {
    RowFormat.MESSAGES: (("messages",), ("conversations",)),
    RowFormat.PROMPT_COMPLETION: (("prompt", "completion"),),
    RowFormat.TOKENIZED: (("input_ids",),),
    RowFormat.PREFERENCE: (("prompt", "chosen", "rejected"),),
    RowFormat.IMPLICIT_PREFERENCE: (("chosen", "rejected"),),
    RowFormat.TOKENIZED_PREFERENCE: (("input_ids_chosen", "input_ids_rejected"),),
    RowFormat.PROMPT: (("prompt",),),
}


def columns_of(dataset: Dataset | IterableDataset) -> list[str]:
    """The names of a dataset's columns; a stream that does not know them is asked for its first row.

    Raises ValueError for a dataset without rows. A stream that knows its columns is not read.
    """
    names = dataset.column_names or list(next(iter(dataset), ()))
    if not names or (isinstance(dataset, Dataset) and len(dataset) == 0):
        raise ValueError(
            "The dataset is empty: there is no row to train or evaluate on. Check its split and its filters, or leave "
            "the dataset out."
        )
    return list(names)


def row_format(
    columns: Iterable[str], accepted: Sequence[RowFormat], *, needed_for: str, text_field: str = "text"
) -> RowFormat:
    """The first of the accepted formats whose columns are all there.

    needed_for: who asks, such as "SFT", for the message. text_field: the column of RowFormat.TEXT.

    Raises ValueError that says which columns there are and which sets would do.
    """
    present = list(columns)
    sets = {kind: ((text_field,),) if kind is RowFormat.TEXT else COLUMN_SETS[kind] for kind in accepted}
    for kind, choices in sets.items():
        if any(set(choice) <= set(present) for choice in choices):
            return kind
    wanted = "; ".join(" + ".join(choice) for choices in sets.values() for choice in choices)
    raise ValueError(
        f"{needed_for} cannot read a dataset with the columns {present}. It needs one of: {wanted}. Rename the "
        "columns, or make them with dataset.map."
    )


def as_messages(row: Row) -> list[dict[str, Any]]:
    """The conversation in `messages`, or in ShareGPT's `conversations` with `from` and `value` renamed."""
    messages = row["messages"] if "messages" in row else row["conversations"]
    return [
        {"role": SHAREGPT_ROLES.get(message["from"], message["from"]), "content": message["value"]}
        if "from" in message
        else dict(message)
        for message in messages
    ]


def preference_parts(row: Row) -> tuple[Any, Any, Any]:
    """Prompt, chosen and rejected of a row with an explicit prompt, or with one that both answers begin with.

    The implicit prompt of conversations is their common leading messages (also where `prompt` is only its text); of
    texts the longest common prefix, cut back to before its last space, so that no word is split.
    """
    chosen, rejected = row["chosen"], row["rejected"]
    prompt = row.get("prompt")
    if prompt is not None and isinstance(prompt, str) == isinstance(chosen, str):
        return prompt, chosen, rejected
    if chosen == rejected:
        raise ValueError(
            "chosen and rejected are the same, so nothing is preferred and no prompt can be told. Drop it."
        )
    common = common_length(chosen, rejected)
    if isinstance(chosen, str):
        last_space = max((i for i, character in enumerate(chosen[:common]) if character.isspace()), default=0)
        common = len(chosen[:last_space].rstrip())
    return chosen[:common], chosen[common:], rejected[common:]


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many leading items are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def prepare_dataset(
    dataset: Dataset | IterableDataset,
    encode: Callable[[dict[str, Any]], Mapping[str, Any]],
    *,
    keep: Collection[str] = (),
    num_proc: int | None = None,
    batch_size: int = 1000,
    desc: str | None = None,
) -> Dataset | IterableDataset:
    """The dataset with the columns that `encode` makes of each row, and those of its own that are named in `keep`.

    A stream stays one: rows are encoded as they are read. num_proc, desc: for a dataset that is not a stream.
    A ValueError of `encode` is raised again with the number of the row, from 0.
    """

    def encode_batch(columns: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        encoded = [numbered(encode, row, number) for row, number in zip(rows, numbers, strict=True)]
        return {name: [row[name] for row in encoded] for name in encoded[0]}

    dropped = [name for name in columns_of(dataset) if name not in keep]
    batches: dict[str, Any] = {"batched": True, "batch_size": batch_size, "with_indices": True}
    if isinstance(dataset, IterableDataset):
        return dataset.map(encode_batch, remove_columns=dropped, **batches)
    with _bars_for_terminals():
        return dataset.map(encode_batch, remove_columns=dropped, num_proc=num_proc, desc=desc, **batches)


@contextmanager
def _bars_for_terminals() -> Iterator[None]:
    """No progress bars of datasets inside the block where stderr is no terminal: a log would fill with them."""
    is_hidden = datasets.is_progress_bar_enabled() and not sys.stderr.isatty()
    if is_hidden:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if is_hidden:
            datasets.enable_progress_bars()


def numbered(encode: Callable[[dict[str, Any]], T], row: dict[str, Any], number: int) -> T:
    """`encode(row)`; its ValueError is raised again with the number of the row."""
    try:
        return encode(row)
    except ValueError as error:
        raise ValueError(f"Row {number}: {error}") from error
