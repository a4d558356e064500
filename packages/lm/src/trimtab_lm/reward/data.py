"""Pairs of answers as token ids, from texts, conversations or the documented pre-tokenized columns."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from trimtab_lm.data.formats import (
    Row,
    RowFormat,
    columns_of,
    common_length,
    preference_parts,
    prepare_dataset,
    row_format,
)
from trimtab_lm.data.sources import as_data
from trimtab_lm.data.tokenization import encode_prompt_completion, ends_in_sep, stop_token_ids, template_settings
from trimtab_lm.data.truncation import IS_TIE, Mode, drop_pairs, drop_ties, report_truncation, truncate_answers
from trimtab_lm.hf.types import DataSource
from trimtab_lm.tokens.positions import Positions

from .collator import SIDES, one_margin, real_tokens
from .config import RewardConfig

FORMATS = (RowFormat.TOKENIZED_PREFERENCE, RowFormat.PREFERENCE, RowFormat.IMPLICIT_PREFERENCE)
TOO_LONG = "is_too_long"
BY_LENGTH = ("group_by_length", "batch_rebalance")
"""Sampling strategies that go by the column `length_column_name`."""


def prepare_pairs(
    dataset: DataSource,
    tokenizer: PreTrainedTokenizerBase,
    args: RewardConfig,
    *,
    keeps_columns: bool = False,
    positions: Positions | None = None,
) -> DataSource:
    """The dataset with the columns that `PairCollator` reads, and pairs longer than max_length dropped or cut.

    Pairs whose answers have the same tokens are dropped. Other columns stay if keeps_columns. A `length_column_name`,
    of both texts together, is made where the sampling goes by it. positions: of the model; ValueError for a text that
    is longer and was neither dropped nor cut.
    """
    dataset = as_data(dataset)
    columns, max_length, mode = columns_of(dataset), args.max_length, args.truncation_mode
    is_tokenized = row_format(columns, FORMATS, needed_for="RewardTrainer") is RowFormat.TOKENIZED_PREFERENCE
    length_column = args.length_column_name if args.train_sampling_strategy in BY_LENGTH else None
    kept = columns if keeps_columns else ()

    def encode(row: Row) -> dict[str, object]:
        pair = _tokenized_pair(row) if is_tokenized else _text_pair(row, tokenizer)
        encoded: dict[str, Any] = {}
        if mode == "filter":
            if max_length is not None:
                encoded[TOO_LONG] = max(len(pair[f"{side}_input_ids"]) for side in SIDES) > max_length
        elif max_length is not None:
            pair = _cut(pair, tokenizer, max_length, mode)
            encoded |= {name: value for name, value in pair.items() if not name.endswith("_ids")}
        encoded[IS_TIE] = pair["chosen_input_ids"] == pair["rejected_input_ids"]
        for side in SIDES:
            ids = pair[f"{side}_input_ids"]
            if positions is not None and not encoded.get(TOO_LONG):
                remedy = f"Lower max_length ({max_length}): truncation_mode={mode!r} says what is done to longer pairs."
                positions.check(f"The {side} text is too long", encoder=len(ids), decoder=len(ids), remedy=remedy)
            encoded |= {f"input_ids_{side}": ids, f"attention_mask_{side}": [1] * len(ids)}
        if "margin" in row:
            encoded["margin"] = one_margin(row["margin"])
        if length_column is not None:
            encoded[length_column] = sum(len(pair[f"{side}_input_ids"]) for side in SIDES)
        return encoded

    pairs = prepare_dataset(dataset, encode, keep=kept, num_proc=args.dataset_num_proc, desc="Tokenizing pairs")
    if max_length is None:
        return drop_ties(pairs)
    limit = f"max_length={max_length}"
    if mode == "filter":
        remedy = "Raise max_length, or cut them with truncation_mode='keep_start' or 'keep_end'."
        return drop_ties(drop_pairs(pairs, TOO_LONG, why=f"has a text of more than {limit} tokens", remedy=remedy))
    return drop_ties(report_truncation(pairs, limit=limit), limit=limit)


def _cut(pair: dict[str, list[int]], tokenizer: PreTrainedTokenizerBase, length: int, mode: Mode) -> dict[str, Any]:
    """A pair of at most so many tokens."""
    first = tokenizer.cls_token_id if ends_in_sep(tokenizer) else tokenizer.bos_token_id
    stops = {tokenizer.sep_token_id} if ends_in_sep(tokenizer) else stop_token_ids(tokenizer)
    sizes = {"max_length": length, "max_prompt_length": None}
    return truncate_answers(pair, **sizes, mode=mode, bos_token_id=first, stop_ids=stops)


def _text_pair(row: Row, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
    """Prompt and answers as `truncate_answers` takes them. The prompt may be empty: a score needs no token before."""
    prompt, *answers = preference_parts(row)
    settings = {**template_settings(row), "add_eos": not ends_in_sep(tokenizer)}
    encoded = [encode_prompt_completion(tokenizer, prompt, answer, **settings) for answer in answers]
    heads = [side["input_ids"][: side["completion_mask"].index(1)] for side in encoded]
    return _pair(encoded[0]["input_ids"], encoded[1]["input_ids"], common_length(*heads))


def _tokenized_pair(row: Row) -> dict[str, list[int]]:
    chosen, rejected = (real_tokens(row, side) for side in SIDES)
    return _pair(chosen, rejected, min(common_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1))


def _pair(chosen: list[int], rejected: list[int], shared: int) -> dict[str, list[int]]:
    pair = {"prompt_input_ids": chosen[:shared]}
    for side, ids in zip(SIDES, (chosen, rejected), strict=True):
        pair[f"{side}_input_ids"] = ids
    return pair
