"""The documented formats of dataset rows, the parts of a row, and the mapping of a function over rows."""

import reprlib
import sys
import uuid
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from itertools import takewhile
from typing import Any, TypeAlias, TypeVar

import datasets
from datasets import Dataset

from trimtab_lm.data.kinds import check_texts
from trimtab_lm.data.media import check_row
from trimtab_lm.data.nulls import NULL_ARGUMENTS, has_null_arguments, without_nulls
from trimtab_lm.interface import Data

Row: TypeAlias = Mapping[str, Any]
"""One row of a dataset: a value for each column."""

Conversation: TypeAlias = Sequence[Row]
"""Messages, each with a role and a content."""

Text: TypeAlias = str | Conversation
"""A prompt or an answer: plain text, or messages for the chat template."""

Tools: TypeAlias = list[dict[str, Any]]
"""The tools that a chat template describes to the model."""

TemplateSettings: TypeAlias = Mapping[str, Any]
"""More arguments of `tokenizer.apply_chat_template`."""

Encoder: TypeAlias = Callable[[dict[str, Any]], Mapping[str, object]]
"""A function from a row to the columns that it becomes."""

T = TypeVar("T")

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


class RowFormat(StrEnum):
    """The formats of a dataset's rows; the columns tell which one a dataset has."""

    TEXT = "text"
    MESSAGES = "messages"
    PROMPT_COMPLETION = "prompt-completion"
    UNPAIRED_PREFERENCE = "unpaired preference"
    TOKENIZED = "tokenized"
    PREFERENCE = "preference"
    IMPLICIT_PREFERENCE = "implicit-prompt preference"
    TOKENIZED_PREFERENCE = "tokenized preference"
    PROMPT = "prompt"


COLUMN_SETS: dict[RowFormat, tuple[tuple[str, ...], ...]] = {
    RowFormat.MESSAGES: (("messages",), ("conversations",)),
    RowFormat.PROMPT_COMPLETION: (("prompt", "completion"),),
    RowFormat.UNPAIRED_PREFERENCE: (("prompt", "completion", "label"),),
    RowFormat.TOKENIZED: (("input_ids",),),
    RowFormat.PREFERENCE: (("prompt", "chosen", "rejected"),),
    RowFormat.IMPLICIT_PREFERENCE: (("chosen", "rejected"),),
    RowFormat.TOKENIZED_PREFERENCE: (("input_ids_chosen", "input_ids_rejected"),),
    RowFormat.PROMPT: (("prompt",),),
}


def columns_of(dataset: Data) -> list[str]:
    """Returns the names of a dataset's columns. Reads the first row of a stream without column names.

    Raises:
        ValueError: the dataset has no rows. A stream that knows its columns is not read, and so not checked.
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
    """Returns the first of the accepted formats whose columns are all present.

    Args:
        accepted: the formats to try, in this order.
        needed_for: the name of the trainer, such as "SFT", for the message.
        text_field: the column of RowFormat.TEXT.

    Raises:
        ValueError: no format matches. The message names the columns and the accepted sets of columns.
    """
    present = list(columns)
    sets = {kind: ((text_field,),) if kind is RowFormat.TEXT else COLUMN_SETS[kind] for kind in accepted}
    for kind, choices in sets.items():
        if any(set(choice) <= set(present) for choice in choices):
            return kind
    wanted = "; ".join(" + ".join(choice) for choices in sets.values() for choice in choices)
    raise ValueError(
        f"{needed_for} cannot read a dataset with the columns {present}. It needs one of: {wanted}. Rename the "
        "columns: --columns prompt=question,completion=answer on the command line, or dataset.map."
    )


def as_messages(row: Row) -> list[dict[str, Any]]:
    """Returns the conversation in `messages`, or the one in ShareGPT's `conversations` with its keys renamed.

    Raises:
        ValueError: it is a text, or None.
    """
    messages = row["messages"] if "messages" in row else row["conversations"]
    if messages is None or isinstance(messages, str):
        check_texts("messages", messages=messages)
    return [
        {"role": SHAREGPT_ROLES.get(message["from"], message["from"]), "content": message["value"]}
        if "from" in message
        else dict(message)
        for message in messages
    ]


def preference_parts(row: Row) -> tuple[Text, Text, Text]:
    """Returns prompt, chosen and rejected of a row. Without a prompt column, the common beginning is the prompt.

    The implicit prompt of conversations is their common leading messages, also where `prompt` is the text of one of
    them. The implicit prompt of texts is their longest common prefix up to its last space, so that no word is split.

    Raises:
        ValueError: there is no explicit prompt, and chosen and rejected are equal; or the prompt and the answers are
            not both texts or both messages, and the answers do not hold the prompt.
    """
    chosen, rejected = row["chosen"], row["rejected"]
    prompt = row.get("prompt")
    check_texts(chosen=chosen, rejected=rejected, **({"prompt": prompt} if prompt is not None else {}))
    if "prompt" in row and prompt is None:
        raise ValueError(
            "The prompt is None. Fill it in. Where the answers begin with their prompt, remove the column: such rows "
            "cannot share a dataset with rows that have a prompt."
        )
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise ValueError(
            f"chosen is a {type(chosen).__name__} and rejected a {type(rejected).__name__}. Make both texts, or both "
            "lists of messages."
        )
    if prompt is not None and isinstance(prompt, str) == isinstance(chosen, str):
        return prompt, chosen, rejected
    if prompt is not None and isinstance(chosen, str):
        raise ValueError(
            "The prompt is a list of messages and the answers are texts. Make the answers messages as well: "
            "[{'role': 'assistant', 'content': answer}]."
        )
    if chosen == rejected:
        raise ValueError(
            "chosen and rejected are the same, so nothing is preferred and the prompt is unknown. Drop the row."
        )
    common = common_length(chosen, rejected)
    if isinstance(chosen, str):
        last_space = max((i for i, character in enumerate(chosen[:common]) if character.isspace()), default=0)
        common = len(chosen[:last_space].rstrip())
    if isinstance(prompt, str) and prompt.strip() and not any(_says(message, prompt) for message in chosen[:common]):
        raise ValueError(
            f"The prompt is the text {reprlib.repr(prompt)}, and the answers are messages that do not begin with it. "
            "Make it messages, [{'role': 'user', 'content': prompt}], or drop the column if the answers begin with "
            "their prompt."
        )
    return chosen[:common], chosen[common:], rejected[common:]


def _says(message: Row, text: str) -> bool:
    """Returns whether a message holds a text, apart from space around it."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return text.strip() in content


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Returns the number of equal leading items."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def prepare_dataset(
    dataset: Data,
    encode: Encoder,
    *,
    keep: Collection[str] = (),
    num_proc: int | None = None,
    batch_size: int = 1000,
    desc: str | None = None,
    **options: Any,
) -> Data:
    """Maps a function over the rows of a dataset. The rows of a stream are encoded when they are read.

    The function gets each row `without_nulls`.

    Args:
        dataset: with at least one row.
        encode: from a row to its new columns.
        keep: the columns that stay; all others are removed.
        num_proc: processes that encode; ignored for a stream.
        batch_size: rows to encode and write at a time.
        desc: the label of the progress bar; ignored for a stream.
        options: more arguments of `Dataset.map`; ignored for a stream.

    Raises:
        ValueError: `encode` raised it, or a row holds an image, a video or a sound. The message begins with the number
            of the row, from 0.
    """
    has_warned = False

    def encode_row(row: dict[str, Any]) -> Mapping[str, object]:
        nonlocal has_warned
        check_row(row)
        if not has_warned and has_null_arguments(row):
            has_warned = True
            warnings.warn(NULL_ARGUMENTS, stacklevel=2)
        return encode(without_nulls(row))

    def encode_batch(columns: dict[str, list[object]], numbers: list[int]) -> dict[str, list[object]]:
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        encoded = [numbered(encode_row, row, number) for row, number in zip(rows, numbers, strict=True)]
        return {name: [row[name] for row in encoded] for name in encoded[0]}

    dropped = [name for name in columns_of(dataset) if name not in keep]
    batches = {"batched": True, "batch_size": batch_size, "with_indices": True, "remove_columns": dropped}
    if not isinstance(dataset, Dataset):
        return dataset.map(encode_batch, **batches)
    if not dataset.cache_files:  # datasets would spend a second on a hash of the function, to look for a file of it
        options = {"new_fingerprint": uuid.uuid4().hex} | options
    with _bars_for_terminals():
        return dataset.map(encode_batch, num_proc=num_proc, desc=desc, **batches, **options)


@contextmanager
def _bars_for_terminals() -> Iterator[None]:
    """Hides the progress bars of datasets inside the block if stderr is not a terminal: they would fill a log file."""
    is_hidden = datasets.is_progress_bar_enabled() and not sys.stderr.isatty()
    if is_hidden:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if is_hidden:
            datasets.enable_progress_bars()


def numbered(encode: Callable[[dict[str, Any]], T], row: dict[str, Any], number: int) -> T:
    """Returns `encode(row)`.

    Raises:
        ValueError: `encode` raised it. The message begins with the number of the row.
    """
    try:
        return encode(row)
    except ValueError as error:
        raise ValueError(f"Row {number}: {error}") from error
