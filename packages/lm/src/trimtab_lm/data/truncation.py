"""Rows that are too long: what is cut by which rule, and one line that says how much."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from datasets import Dataset, IterableDataset

Mode = Literal["keep_start", "keep_end"]

TOKENS_CUT, IS_EMPTIED = "tokens_cut", "is_emptied"


class TruncatedRow(NamedTuple):
    """Ids and mask of one row, how many tokens were cut, and whether none of those that counted is left."""

    input_ids: list[int]
    mask: list[int]
    tokens_cut: int
    is_emptied: bool

    @property
    def counts(self) -> dict[str, Any]:
        """The columns that `report_truncation` reads."""
        return {TOKENS_CUT: self.tokens_cut, IS_EMPTIED: self.is_emptied}


def check_mode(mode: str) -> None:
    if mode not in ("keep_start", "keep_end"):
        raise ValueError(f"truncation_mode={mode!r} is unknown. Use 'keep_start' or 'keep_end'.")


def truncate_row(
    ids: Sequence[int],
    mask: Sequence[int],
    *,
    max_length: int | None,
    mode: Mode = "keep_start",
    bos_token_id: int | None = None,
    stop_ids: Collection[int] = (),
) -> TruncatedRow:
    """One sequence cut to max_length tokens (None: as it is).

    keep_start cuts the end, but a last token that is in stop_ids stays. keep_end cuts the start, but a first token
    that is bos_token_id stays. Without the two the cut is plain: a text that is cut in the middle should not end in
    EOS if the model is to learn from it, and should if a score is read at its end.
    """
    places = _kept(ids, max_length, mode, bos_token_id, stop_ids)
    kept = [mask[i] for i in places]
    return TruncatedRow([ids[i] for i in places], kept, len(ids) - len(places), any(mask) and not any(kept))


def truncate_pair(
    row: Mapping[str, Any],
    *,
    max_length: int | None,
    max_prompt_length: int | None,
    mode: Mode = "keep_end",
    bos_token_id: int | None = None,
    stop_ids: Collection[int] = (),
) -> dict[str, Any]:
    """A row of `encode_preference` of at most max_length tokens per answer with its prompt, and its counts.

    In this order, and each step only if the one before it was not enough:
    1. The prompt is cut to max_prompt_length, whatever the answers' length.
    2. If prompt and longer answer exceed max_length, the prompt is cut until they fit, though not below half of
       max_length, so that an answer keeps a question to it.
    3. Each answer is cut to what the prompt leaves of max_length: never less than half of it, and more by as much as
       the prompt is shorter.

    mode holds for all three. keep_end keeps the end of the prompt (and its BOS) and of the answers; keep_start keeps
    the start of the prompt and of the answers, and their stop token. No answer is ever emptied.

    Raises ValueError for a max_length below 2 or a max_prompt_length below 1, which leave no prompt or no answer.
    """
    if (max_length is not None and max_length < 2) or (max_prompt_length is not None and max_prompt_length < 1):
        raise ValueError(
            f"max_length={max_length} and max_prompt_length={max_prompt_length} leave no room for a prompt and an "
            "answer. Use at least 2 and 1."
        )
    prompt = row["prompt_input_ids"]
    answers = {name: row[f"{name}_input_ids"][len(prompt) :] for name in ("chosen", "rejected")}
    allowed = len(prompt) if max_prompt_length is None else min(len(prompt), max_prompt_length)
    if max_length is not None:
        fitting = max_length - max(map(len, answers.values()))
        allowed = min(allowed, max(fitting, max_length // 2))
    prompt_places = _kept(prompt, allowed, mode, bos_token_id, ())
    kept_prompt = [prompt[i] for i in prompt_places]
    cut = len(prompt) - len(kept_prompt)
    result: dict[str, Any] = {"prompt_input_ids": kept_prompt}
    for name, answer in answers.items():
        room = None if max_length is None else max_length - len(kept_prompt)
        places = _kept(answer, room, mode, None, stop_ids)
        result[f"{name}_input_ids"] = kept_prompt + [answer[i] for i in places]
        result[f"{name}_mask"] = [0] * len(kept_prompt) + [1] * len(places)
        cut += len(answer) - len(places)
    return {**result, TOKENS_CUT: cut, IS_EMPTIED: False}


def truncate_columns(
    row: Mapping[str, Sequence[int]],
    limits: Mapping[str, int | None],
    *,
    mode: Mode = "keep_end",
    bos_token_id: int | None = None,
    stop_ids: Collection[int] = (),
) -> dict[str, Any]:
    """An encoder-decoder row, each column cut to its own limit, and its counts.

    limits: such as {"prompt_input_ids": max_prompt_length, "chosen_input_ids": max_target_length}. Columns without
    one stay. mode, bos_token_id, stop_ids: as in `truncate_row`.
    """
    result: dict[str, Any] = {name: list(ids) for name, ids in row.items()}
    for name, limit in limits.items():
        result[name] = [row[name][i] for i in _kept(row[name], limit, mode, bos_token_id, stop_ids)]
    return {**result, TOKENS_CUT: sum(len(row[name]) - len(result[name]) for name in limits), IS_EMPTIED: False}


@dataclass(frozen=True)
class TruncationReport:
    """What was cut from a dataset."""

    rows: int
    rows_cut: int
    tokens_cut: int
    rows_emptied: int

    @classmethod
    def of(cls, dataset: Dataset) -> "TruncationReport":
        """Counts over the columns that the functions above add."""
        cuts, emptied = list(dataset[TOKENS_CUT]), list(dataset[IS_EMPTIED])
        return cls(len(cuts), sum(cut > 0 for cut in cuts), sum(cuts), sum(emptied))

    def line(self, limit: str) -> str:
        """One line for the reader. limit: what did it, such as "max_length=512"."""
        cut = f"{limit}: cut {self.tokens_cut:,} tokens from {self.rows_cut:,} of {self.rows:,} rows"
        emptied = f", and dropped {self.rows_emptied:,} that had nothing left to learn" if self.rows_emptied else ""
        return f"{cut}{emptied}; raise it, or shorten the rows."


def report_truncation(dataset: Dataset | IterableDataset, *, limit: str) -> Dataset | IterableDataset:
    """The dataset without the count columns and the rows that truncation emptied, and one warning if any was cut.

    limit: what was asked for, such as "max_length=512". A stream cannot be counted before it is read: its first cut
    row warns. Raises ValueError if no row is left.
    """
    if isinstance(dataset, IterableDataset):
        return _drop_emptied_of_stream(dataset, limit)
    report = TruncationReport.of(dataset)
    if report.rows and report.rows_emptied == report.rows:
        raise ValueError(
            f"{limit} cuts every token to learn from all {report.rows:,} rows. Raise it, shorten the prompts, or use "
            "truncation_mode='keep_end'."
        )
    if report.tokens_cut:
        warnings.warn(report.line(limit), stacklevel=2)
    if report.rows_emptied:
        kept = [i for i, is_emptied in enumerate(dataset[IS_EMPTIED]) if not is_emptied]
        dataset = dataset.select(kept)
    return dataset.remove_columns([TOKENS_CUT, IS_EMPTIED])


def _drop_emptied_of_stream(dataset: IterableDataset, limit: str) -> IterableDataset:
    seen = {"is_cut": False}

    def is_kept(row: dict[str, Any]) -> bool:
        if row[TOKENS_CUT] and not seen["is_cut"]:
            seen["is_cut"] = True
            warnings.warn(
                f"{limit}: cut {row[TOKENS_CUT]:,} tokens from a row of the stream, as it will from all that are "
                "longer; rows left with nothing to learn are dropped. Raise it, or shorten the rows.",
                stacklevel=2,
            )
        return not row[IS_EMPTIED]

    return dataset.filter(is_kept).remove_columns([TOKENS_CUT, IS_EMPTIED])


def _kept(
    ids: Sequence[int], limit: int | None, mode: Mode, bos_token_id: int | None, stop_ids: Collection[int]
) -> list[int]:
    """Indices of the tokens that stay; keep_start spares a stop token at the end, keep_end a BOS at the start."""
    count = len(ids)
    if limit is None or count <= limit:
        return list(range(count))
    if mode == "keep_start":
        return [*range(limit - 1), count - 1] if limit and ids[-1] in stop_ids else list(range(limit))
    is_bos_first = bos_token_id is not None and ids[0] == bos_token_id
    return [0, *range(count - limit + 1, count)] if limit > 1 and is_bos_first else list(range(count - limit, count))
