"""Rows of every documented format as token ids and labels, packed where that is asked for."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from trimtab_lm.data.formats import Row, RowFormat, as_messages, columns_of, prepare_dataset, row_format
from trimtab_lm.data.sources import as_data
from trimtab_lm.data.tokenization import (
    Columns,
    encode_messages,
    encode_prompt_completion,
    encode_seq2seq,
    encode_text,
    stop_token_ids,
    template_settings,
)
from trimtab_lm.data.truncation import TOKENS_CUT, report_truncation, truncate_row
from trimtab_lm.hf.types import DataSource
from trimtab_lm.interface import Data
from trimtab_lm.legacy.constant_length import ConstantLengthDataset
from trimtab_lm.tokens.ids import check_labels
from trimtab_lm.tokens.layout import best_fit
from trimtab_lm.tokens.positions import Positions

from .config import SFTConfig

FORMATS = (RowFormat.TOKENIZED, RowFormat.MESSAGES, RowFormat.PROMPT_COMPLETION, RowFormat.TEXT)
Formatting = Callable[[Row], str | list[str]]
"""A user's function from a row to its text, or from columns of rows to their texts."""


def tokenize_rows(
    dataset: DataSource,
    tokenizer: PreTrainedTokenizerBase,
    config: SFTConfig,
    *,
    formatting_func: Formatting | None = None,
    is_encoder_decoder: bool = False,
    with_labels: bool = True,
    is_cut: bool = True,
    positions: Positions | None = None,
) -> Data:
    """A data set (or stream) of texts, conversations, prompts with completions or ids, as `input_ids` and `labels`.

    labels are -100 where a token does not count; with_labels=False leaves them to a collator, where every token does.
    is_cut: cut rows to max_length, and warn with the number of tokens removed. positions: of the model; ValueError for
    a row that is longer after the cut.
    """
    dataset = as_data(dataset)
    columns = columns_of(dataset)
    kind = format_of(columns, config, formatting_func)
    read = text_of(dataset, config, formatting_func)
    encode = _encoder(kind, read, tokenizer, config, is_encoder_decoder=is_encoder_decoder)
    if config.assistant_only_loss and kind != RowFormat.MESSAGES:
        raise ValueError(f"assistant_only_loss needs conversations in a column 'messages', and these are {kind} rows.")
    if config.completion_only_loss and kind != RowFormat.PROMPT_COMPLETION:
        raise ValueError(
            f"completion_only_loss needs the columns prompt and completion, and these are {kind} rows. Split the "
            "texts, or use DataCollatorForCompletionOnlyLM."
        )
    if is_encoder_decoder and kind not in (RowFormat.PROMPT_COMPLETION, RowFormat.TOKENIZED):
        raise ValueError(
            f"An encoder-decoder model learns completions from prompts, and the data set has {columns}. Give it the "
            "columns prompt and completion, or input_ids and labels."
        )
    adds_special_tokens = (config.dataset_kwargs or {}).get("add_special_tokens", True)
    if is_encoder_decoder and kind == RowFormat.PROMPT_COMPLETION and not adds_special_tokens:
        raise ValueError(
            "dataset_kwargs={'add_special_tokens': False} is for causal models: what an encoder-decoder model reads "
            "and writes ends in EOS. Leave it out; a text that begins with BOS gets no second one."
        )

    def check_length(**lengths: int) -> None:
        if positions is not None:
            positions.check("The row is too long", **lengths, remedy=f"Lower max_length ({config.max_length}).")

    def encode_row(row: Row) -> Mapping[str, object]:
        encoded = encode(row)
        if is_encoder_decoder:
            limits: dict[str, Any] = {"max_length": config.max_length, "mode": config.truncation_mode}
            ids, labels = encoded["input_ids"], encoded["labels"]
            read = truncate_row(ids, [1] * len(ids), stop_ids=stop_token_ids(tokenizer), **limits)
            written = truncate_row(labels, [1] * len(labels), **limits)
            check_length(encoder=len(read.input_ids), decoder=len(written.input_ids))
            counts = {**written.counts, TOKENS_CUT: read.tokens_cut + written.tokens_cut}
            return {"input_ids": read.input_ids, "labels": written.input_ids, **counts}
        ids, mask = encoded["input_ids"], encoded["mask"]
        cut = truncate_row(ids, mask, max_length=config.max_length if is_cut else None, mode=config.truncation_mode)  # type: ignore[arg-type]
        if not any(mask):
            raise ValueError("None of its tokens counts, so there is nothing to learn. Drop it, or check the labels.")
        check_length(decoder=len(cut.input_ids))
        labels = [token if one else -100 for token, one in zip(cut.input_ids, cut.mask, strict=True)]
        is_plain = not with_labels and kind in (RowFormat.TEXT, RowFormat.MESSAGES) and not config.assistant_only_loss
        return {"input_ids": cut.input_ids, **({} if is_plain else {"labels": labels}), **cut.counts}

    size = config.dataset_batch_size or (len(dataset) if isinstance(dataset, Dataset) else 1000)
    rows = prepare_dataset(dataset, encode_row, num_proc=config.dataset_num_proc, batch_size=size, desc="tokenizing")
    return report_truncation(rows, limit=f"max_length={config.max_length}")


def format_of(columns: Sequence[str], config: SFTConfig, formatting_func: Formatting | None) -> RowFormat:
    """What rows of these columns are; with a formatting_func they are texts."""
    if formatting_func is not None:
        return RowFormat.TEXT
    return row_format(columns, FORMATS, needed_for="SFT", text_field=config.dataset_text_field)


def _encoder(
    kind: RowFormat,
    read: Callable[[Row], str],
    tokenizer: PreTrainedTokenizerBase,
    config: SFTConfig,
    *,
    is_encoder_decoder: bool,
) -> Callable[[Row], Columns]:
    """From a row of this format to `input_ids` and `mask` (or `labels`, for an encoder-decoder model)."""
    add_special_tokens = (config.dataset_kwargs or {}).get("add_special_tokens", True)

    settings = partial(template_settings, chat_template_kwargs=config.chat_template_kwargs)

    def encode(row: Row) -> Columns:
        if kind == RowFormat.TOKENIZED:
            return _tokenized(row, is_encoder_decoder=is_encoder_decoder)
        if kind == RowFormat.TEXT:
            return _text(tokenizer, read(row), add_special_tokens=add_special_tokens)
        if kind == RowFormat.MESSAGES:
            only = config.assistant_only_loss
            encoded = encode_messages(tokenizer, as_messages(row), assistant_only=only, **settings(row))
            return {"input_ids": encoded["input_ids"], "mask": encoded["assistant_masks"]}
        prompt, completion = row["prompt"], row["completion"]
        if is_encoder_decoder:
            return encode_seq2seq(tokenizer, prompt, completion, **settings(row))
        special = {
            "add_special_tokens": add_special_tokens,
            "add_eos": add_special_tokens or not isinstance(prompt, str),
        }
        encoded = encode_prompt_completion(tokenizer, prompt, completion, **special, **settings(row))
        ids, mask = encoded["input_ids"], encoded["completion_mask"]
        return {"input_ids": ids, "mask": [1] * len(ids) if config.completion_only_loss is False else mask}

    return encode


def _text(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool) -> Columns:
    if not text:
        raise ValueError("The text is empty: there is nothing to learn from it. Drop the row.")
    if add_special_tokens:
        ids = encode_text(tokenizer, text)["input_ids"]
    else:
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return {"input_ids": ids, "mask": [1] * len(ids)}


def _tokenized(row: Row, *, is_encoder_decoder: bool) -> Columns:
    ids = list(row["input_ids"])
    real = [bool(one) for one in row.get("attention_mask") or [1] * len(ids)]
    if is_encoder_decoder:
        if row.get("labels") is None:
            raise ValueError("An encoder-decoder model needs labels as well as input_ids. Add the column.")
        return {
            "input_ids": [token for token, one in zip(ids, real, strict=True) if one],
            "labels": [label for label in row["labels"] if label != -100],
        }
    mask = row.get("completion_mask") or row.get("assistant_masks") or [1] * len(ids)
    if row.get("labels") is not None:
        check_labels(ids, row["labels"], real)
        mask = [int(label != -100) for label in row["labels"]]
    kept = [(token, int(one)) for token, one, there in zip(ids, mask, real, strict=True) if there]
    return {"input_ids": [token for token, _ in kept], "mask": [one for _, one in kept]}


def text_of(dataset: Data, config: SFTConfig, formatting_func: Formatting | None) -> Callable[[Row], str]:
    """What gives a row's text: a column, or a user's function of a row.

    A function from columns of rows to a list of texts is recognized by a call with two rows.
    """
    if formatting_func is None:
        return lambda row: row[config.dataset_text_field]
    first = [row for _, row in zip(range(2), dataset, strict=False)]
    try:
        texts: object = formatting_func({name: [row[name] for row in first] for name in first[0]})
    except (TypeError, ValueError, KeyError, AttributeError, IndexError):
        texts = None  # a function of one row, given columns
    is_batched = isinstance(texts, list) and len(texts) == len(first) and all(isinstance(t, str) for t in texts)

    def read(row: Row) -> str:
        text = (
            formatting_func({name: [value] for name, value in row.items()})[0] if is_batched else formatting_func(row)
        )
        if not isinstance(text, str):
            raise ValueError(
                f"formatting_func returned a {type(text).__name__}. It takes a row and returns its text (or takes "
                "columns of rows and returns a list of texts)."
            )
        return text

    return read


# Packing -------------------------------------------------------------------------------------------------------------


class PackedDataset(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Rows of at most max_length tokens, each of several rows of `dataset`: see `best_fit`. Nothing is copied."""

    def __init__(self, dataset: Dataset, max_length: int):
        self.dataset = dataset
        self.rows = best_fit([len(ids) for ids in dataset["input_ids"]], max_length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return joined(self.dataset[self.rows[index]])


def joined(columns: Mapping[str, Sequence[list[int]]]) -> dict[str, list[int]]:
    """Documents one after the other: `input_ids`, `labels`, and their lengths in `seq_lengths`."""
    return {
        "input_ids": [*chain.from_iterable(columns["input_ids"])],
        "labels": [*chain.from_iterable(columns["labels"])],
        "seq_lengths": [len(ids) for ids in columns["input_ids"]],
    }


def pack(dataset: Data, config: SFTConfig) -> DataSource:
    """Tokenized rows in rows of at most max_length tokens, best fit; a stream one batch of rows at a time."""
    width = config.max_length or 0
    if isinstance(dataset, Dataset):
        return PackedDataset(dataset, width)

    def fill(columns: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        rows = best_fit([len(ids) for ids in columns["input_ids"]], width)
        packed = [joined({name: [columns[name][i] for i in row] for name in ("input_ids", "labels")}) for row in rows]
        return {name: [row[name] for row in packed] for name in packed[0]}

    size = config.dataset_batch_size or 1000
    return dataset.map(fill, batched=True, batch_size=size, remove_columns=["input_ids", "labels"])


def rows_of_constant_length(
    dataset: DataSource,
    tokenizer: PreTrainedTokenizerBase,
    config: SFTConfig,
    *,
    formatting_func: Formatting | None,
    infinite: bool,
) -> DataSource:
    """Documents one after the other, cut where a row of max_length tokens is full; a stream if the data are one.

    infinite: begin again at the data's end, in a stream of rows.
    """
    dataset = as_data(dataset)
    options = {name: value for name, value in (config.dataset_kwargs or {}).items() if name != "skip_prepare_dataset"}
    if format_of(columns_of(dataset), config, formatting_func) is RowFormat.TEXT:
        options["formatting_func"] = text_of(dataset, config, formatting_func)
    else:  # ids by the rules of the format, with the tokens that count
        dataset = tokenize_rows(dataset, tokenizer, config, is_cut=False)
    rows = ConstantLengthDataset(
        tokenizer,
        dataset,
        infinite=infinite,
        seq_length=config.max_length or 0,
        num_of_sequences=config.num_of_sequences,
        chars_per_token=config.chars_per_token,
        seed=config.seed,
        **options,
    )
    is_stream = infinite or not isinstance(dataset, Dataset)
    return rows if is_stream else Dataset.from_list([{k: v.tolist() for k, v in row.items()} for row in rows])
