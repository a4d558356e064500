"""Truncates long rows, drops pairs that cannot be used, and warns of it."""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from datasets import Dataset, IterableDataset

from trimtab_lm.data.formats import Row
from trimtab_lm.interface import Data

Mode = Literal["keep_start", "keep_end"]

TOKENS_CUT, IS_EMPTIED = "tokens_cut", "is_emptied"
"""The columns of counts, which `report_truncation` reads and removes."""
IS_TIE = "is_tie"
"""The column that marks pairs whose answers have the same tokens, which `drop_ties` reads and removes."""


class TruncatedRow(NamedTuple):
    """One row after truncation.

    Args:
        input_ids, mask: the remaining tokens; the mask is 1 where a token counts.
        tokens_cut: how many tokens were removed.
        is_emptied: whether all tokens that counted were removed.
    """

    input_ids: list[int]
    mask: list[int]
    tokens_cut: int
    is_emptied: bool

    @property
    def counts(self) -> dict[str, int]:
        """The columns that `report_truncation` reads."""
        return {TOKENS_CUT: self.tokens_cut, IS_EMPTIED: self.is_emptied}


def check_mode(mode: str, modes: Sequence[str] = get_args(Mode)) -> None:
    """Checks the name of a truncation mode.

    Raises:
        ValueError: it is none of `modes`.
    """
    if mode not in modes:
        raise ValueError(f"truncation_mode={mode!r} is unknown. Use {' or '.join(map(repr, modes))}.")


def check_limit(mode: str, *, max_length: int | None) -> None:
    """Checks the settings by which texts are cut.

    Args:
        max_length: the most tokens of a text; None: no limit.

    Raises:
        ValueError: the mode is unknown, or the limit leaves no token that another predicts.
    """
    check_mode(mode)
    if max_length is not None and max_length < 2:
        raise ValueError(f"max_length={max_length}: a row needs two tokens, one to predict the other. Raise it.")


def check_limits(
    mode: str,
    modes: Sequence[str] = get_args(Mode),
    /,
    *,
    max_length: int | None,
    max_prompt_length: int | None = None,
) -> None:
    """Checks the settings by which prompts with answers are cut.

    Args:
        mode: one of `modes`.
        max_length: the most tokens of a prompt with an answer; None: no limit.
        max_prompt_length: the most tokens of a prompt; None: no limit.

    Raises:
        ValueError: the mode is unknown, or the limits leave no token to a prompt or to an answer.
    """
    check_mode(mode, modes)
    if max_length is not None and max_length < 2:
        raise ValueError(f"max_length={max_length} leaves no room for a prompt and an answer. Use at least 2.")
    if max_length is not None and (max_prompt_length or 0) >= max_length:
        raise ValueError(
            f"max_prompt_length={max_prompt_length} leaves nothing of max_length={max_length} to an answer. Make it "
            "smaller."
        )


def limits_in_words(settings: object, names: Sequence[str]) -> str:
    """The limits that are set, such as "max_length=512", in one line for messages.

    Args:
        names: the settings that are limits. None is no limit.
    """
    limits = {name: getattr(settings, name) for name in names}
    return ", ".join(f"{name}={limit}" for name, limit in limits.items() if limit is not None)


def truncate_row(
    ids: Sequence[int],
    mask: Sequence[int],
    *,
    max_length: int | None,
    mode: Mode = "keep_start",
    bos_token_id: int | None = None,
    stop_ids: Collection[int] = (),
) -> TruncatedRow:
    """Truncates one sequence.

    A truncated text should not end in EOS if the model learns to write it, and should if a score is read at its end or
    an encoder reads it. Pass no stop_ids in the first case.

    Args:
        mask: 1 where a token counts.
        max_length: the most tokens that stay; None: all.
        mode: keep_start cuts the end, keep_end cuts the start.
        bos_token_id: with keep_end, stays if it is the first token.
        stop_ids: with keep_start, one of these stays if it is the last token.
    """
    places = _kept(ids, max_length, mode, bos_token_id, stop_ids)
    kept = [mask[i] for i in places]
    return TruncatedRow([ids[i] for i in places], kept, len(ids) - len(places), any(mask) and not any(kept))


def truncate_answers(
    row: Row,
    *,
    max_length: int | None,
    max_prompt_length: int | None,
    mode: Mode = "keep_end",
    bos_token_id: int | None = None,
    stop_ids: Collection[int] = (),
) -> dict[str, Any]:
    """Truncates a prompt and its answers, such as those of a preference pair.

    The steps, each only if the one before was not enough:

    1. Cut the prompt to max_prompt_length, whatever the answers' length.
    2. Cut the prompt until it and the longest answer fit into max_length, but not below half of max_length, so that the
       question is not lost.
    3. Cut each answer to what the prompt leaves of max_length, which is at least half of it.

    No answer becomes empty.

    Args:
        row: `prompt_input_ids`, and `*_input_ids` of each answer with the prompt before it, as of `encode_preference`.
        max_length: the most tokens of the prompt with one answer, 2 or more; None: no limit.
        max_prompt_length: the most tokens of the prompt, 1 or more; None: no limit.
        mode: keep_end keeps the end of the prompt and of the answers, keep_start their start.
        bos_token_id: with keep_end, stays if it is the prompt's first token.
        stop_ids: with keep_start, one of these stays if it is an answer's last token.

    Returns:
        `prompt_input_ids`, each answer's `*_input_ids`, and the counts for `report_truncation`.
    """
    prompt = row["prompt_input_ids"]
    names = [name.removesuffix("_input_ids") for name in row if name.endswith("_input_ids")]
    answers = {name: row[f"{name}_input_ids"][len(prompt) :] for name in names if name != "prompt"}
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
    """Truncates each column of an encoder-decoder row to its own limit.

    Args:
        row: token ids by column.
        limits: such as {"prompt_input_ids": max_prompt_length, "chosen_input_ids": max_target_length}. A column without
            a limit is not cut.
        mode, bos_token_id, stop_ids: as in `truncate_row`.

    Returns:
        The row, and its counts for `report_truncation`.
    """
    kept = {name: _kept(ids, limits.get(name), mode, bos_token_id, stop_ids) for name, ids in row.items()}
    result = {name: [row[name][i] for i in places] for name, places in kept.items()}
    return {**result, TOKENS_CUT: sum(len(row[name]) - len(result[name]) for name in limits), IS_EMPTIED: False}


def report_truncation(dataset: Data, *, limit: str) -> Data:
    """Removes the columns of counts and the rows that truncation emptied, and warns once if any row was cut.

    A stream cannot be counted before it is read. It warns at its first row that was cut.

    Args:
        dataset: with the columns of counts.
        limit: the setting that caused the cuts, such as "max_length=512".

    Raises:
        ValueError: no row is left.
    """
    if not isinstance(dataset, Dataset):
        return _drop_of_stream(
            dataset,
            IS_EMPTIED,
            warns_at=TOKENS_CUT,
            warning=lambda row: (
                f"{limit}: cut {row[TOKENS_CUT]:,} tokens from a row of the stream. All longer rows "
                "are cut, and rows with nothing left to learn are dropped. Raise the limit, or shorten the rows."
            ),
        )
    cuts, emptied = list(dataset[TOKENS_CUT]), list(dataset[IS_EMPTIED])
    if cuts and all(emptied):
        raise ValueError(
            f"{limit} leaves no token to learn from in any of {len(cuts):,} rows. Raise the limit, shorten the "
            "prompts, or use truncation_mode='keep_end'."
        )
    if any(cuts):
        cut = f"{limit}: cut {sum(cuts):,} tokens from {sum(one > 0 for one in cuts):,} of {len(cuts):,} rows"
        dropped = f", and dropped {sum(emptied):,} that had nothing left to learn" if any(emptied) else ""
        warnings.warn(f"{cut}{dropped}. Raise the limit, or shorten the rows.", stacklevel=2)
    if any(emptied):
        dataset = dataset.select([i for i, is_emptied in enumerate(emptied) if not is_emptied])
    return dataset.remove_columns([TOKENS_CUT, IS_EMPTIED])


def _drop_of_stream(
    dataset: IterableDataset, mark: str, *, warns_at: str, warning: Callable[[Row], str]
) -> IterableDataset:
    """Removes marked rows of a stream and the columns `mark` and `warns_at`.

    Args:
        mark: the column, true for a row to remove.
        warns_at: the column, true for a row that needs the warning. The first such row warns.
        warning: from that row to the text of the warning.
    """
    has_warned = False

    def is_kept(row: Row) -> bool:
        nonlocal has_warned
        if row[warns_at] and not has_warned:
            has_warned = True
            warnings.warn(warning(row), stacklevel=2)
        return not row[mark]

    return dataset.filter(is_kept).remove_columns([*{mark, warns_at}])


def drop_ties(dataset: Data, *, limit: str = "") -> Data:
    """Removes the pairs whose answers have the same tokens, as they are or after truncation; see `drop_pairs`.

    Args:
        dataset: with the column IS_TIE.
        limit: the settings that may have caused it, such as "max_length=512".
    """
    why = "has a chosen and a rejected answer of the same tokens" + (f" ({limit})" if limit else "")
    return drop_pairs(dataset, IS_TIE, why=why, remedy="Nothing is preferred there: check the columns and the limits.")


def drop_pairs(dataset: Data, mark: str, *, why: str, remedy: str) -> Data:
    """Removes marked pairs and the column of marks, and warns once: of their number, or at the first one of a stream.

    Args:
        mark: the column, True for a pair to remove.
        why: what is wrong with such a pair, such as "has a text of more than max_length=512 tokens".
        remedy: how to keep the pairs.

    Raises:
        ValueError: no pair is left.
    """
    if not isinstance(dataset, Dataset):
        text = f"A pair of the stream {why}: it is dropped, as all such are. {remedy}"
        return _drop_of_stream(dataset, mark, warns_at=mark, warning=lambda _: text)
    kept = [i for i, is_marked in enumerate(dataset[mark]) if not is_marked]
    dropped = len(dataset) - len(kept)
    if dropped and not kept:
        raise ValueError(f"Each of the {dropped:,} pairs {why}, so none is left. {remedy}")
    if dropped:
        warnings.warn(f"Dropped {dropped:,} of {len(dataset):,} pairs, each of which {why}. {remedy}", stacklevel=2)
        dataset = dataset.select(kept)
    return dataset.remove_columns(mark)


def _kept(
    ids: Sequence[int], limit: int | None, mode: Mode, bos_token_id: int | None, stop_ids: Collection[int]
) -> list[int]:
    """Returns the indices of the tokens that stay: see `truncate_row`."""
    count = len(ids)
    if limit is None or count <= limit:
        return list(range(count))
    if mode == "keep_start":
        return [*range(limit - 1), count - 1] if limit and ids[-1] in stop_ids else list(range(limit))
    is_bos_first = bos_token_id is not None and ids[0] == bos_token_id
    return [0, *range(count - limit + 1, count)] if limit > 1 and is_bos_first else list(range(count - limit, count))
