"""Checks the rows of a step, tokenizes texts, and truncates."""

import warnings
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trimtab_lm.data.formats import RowFormat, columns_of, prepare_dataset, row_format
from trimtab_lm.data.sources import as_data
from trimtab_lm.data.tokenization import encode_prompt_completion, encode_seq2seq, encode_text, template_settings
from trimtab_lm.data.truncation import IS_EMPTIED, TOKENS_CUT, report_truncation, truncate_row
from trimtab_lm.interface import Model, base_of
from trimtab_lm.tokens.ids import check_ids, check_labels, check_mask, vocabulary_size
from trimtab_lm.tokens.positions import Positions

from .config import IterativeSFTConfig

Rows = list[dict[str, list[int]]]
FORMATS = (RowFormat.TOKENIZED, RowFormat.PROMPT_COMPLETION, RowFormat.TEXT)


class Reader(NamedTuple):
    """What a model reads."""

    is_encoder_decoder: bool
    positions: Positions
    vocab_size: int

    @classmethod
    def of(cls, model: Model) -> "Reader":
        """What `model` reads."""
        is_encoder_decoder = bool(base_of(model).config.is_encoder_decoder)
        return cls(is_encoder_decoder, Positions.of(model), vocabulary_size(model))


def refuse_unread(arguments: Mapping[str, object]) -> None:
    """Raises ValueError for arguments of `step` that belong to the other kind of rows: texts, or tensors."""
    if came := [name for name, value in arguments.items() if value is not None]:
        raise ValueError(
            f"step() got {' and '.join(came)} {'without' if 'texts_labels' in came else 'beside'} texts, and would "
            "ignore what does not belong together. Give texts and texts_labels, or input_ids, attention_mask and "
            "labels."
        )


def rows_of_tensors(
    input_ids: Sequence[Tensor] | None,
    attention_mask: Sequence[Tensor] | None,
    labels: Sequence[Tensor] | None,
    reader: Reader,
) -> Rows:
    """`input_ids` and `labels` of each row, without masked positions and not cut; see IterativeSFTTrainer.step."""
    if input_ids is None:
        raise ValueError("step() got neither input_ids nor texts. Give one of them.")
    if reader.is_encoder_decoder and labels is None:
        raise ValueError("An encoder-decoder model needs labels beside input_ids: what the decoder is to write.")
    _check_lists(input_ids, {"attention_mask": attention_mask, "labels": labels})
    check_ids("input_ids", input_ids, reader.vocab_size)
    if labels is not None:
        check_ids("labels", labels, reader.vocab_size, ignored=-100)
    rows = []
    for i, ids in enumerate(input_ids):
        row = {"input_ids": ids.tolist(), "labels": (ids if labels is None else labels[i]).tolist()}
        real = [True] * len(ids)
        if attention_mask is not None:
            check_mask(f"attention_mask[{i}]", attention_mask[i], ids, of="row of input_ids")
            real = attention_mask[i].bool().tolist()
        if reader.is_encoder_decoder:
            row["labels"] = [label for label in row["labels"] if label != -100]
        else:
            check_labels(row["input_ids"], row["labels"], real, row=f"[{i}]")
            row["labels"] = list(compress(row["labels"], real))
        rows.append(row | {"input_ids": list(compress(row["input_ids"], real))})
    return rows


def rows_of_texts(
    texts: Sequence[str],
    texts_labels: Sequence[str] | None,
    tokenizer: PreTrainedTokenizerBase,
    reader: Reader,
) -> Rows:
    """`input_ids` and `labels` of each text, not cut; see IterativeSFTTrainer.step."""
    if reader.is_encoder_decoder and texts_labels is None:
        raise ValueError("An encoder-decoder model needs texts_labels beside texts: what the decoder is to write.")
    _check_lists(texts, {"texts_labels": texts_labels})
    targets = texts if texts_labels is None else texts_labels
    for i, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            raise ValueError(f"texts[{i}] is {text!r}; a text that is not empty is needed.")
    rows = []
    for i, (text, target) in enumerate(zip(texts, targets, strict=True)):
        if not target:
            raise ValueError(f"texts_labels[{i}] is empty: there is nothing to learn from the row. Leave it out.")
        if reader.is_encoder_decoder:
            rows.append(encode_seq2seq(tokenizer, text, target))
        else:
            rows.append(_learning(tokenizer, text, target, i))
    check_ids("texts", [torch.tensor(row["input_ids"]) for row in rows], reader.vocab_size)
    return rows


def tokenize_dataset(
    dataset: Any, tokenizer: PreTrainedTokenizerBase, config: IterativeSFTConfig, reader: Reader
) -> Any:
    """A data set as `input_ids` and `labels`."""
    dataset = as_data(dataset)
    kind = row_format(columns_of(dataset), FORMATS, needed_for="IterativeSFT")

    def whole(row: Mapping[str, Any]) -> dict[str, list[int]]:
        if kind == RowFormat.TOKENIZED:
            ids, mask, labels = (None if row.get(name) is None else [torch.tensor(row[name])] for name in COLUMNS)
            return rows_of_tensors(ids, mask, labels, reader)[0]
        if kind == RowFormat.TEXT:
            return rows_of_texts([row["text"]], None, tokenizer, reader)[0]
        texts, settings = (row["prompt"], row["completion"]), template_settings(row)
        if reader.is_encoder_decoder:
            return encode_seq2seq(tokenizer, *texts, **settings)
        encoded = encode_prompt_completion(tokenizer, *texts, **settings)
        pairs = zip(encoded["input_ids"], encoded["completion_mask"], strict=True)
        return {"input_ids": encoded["input_ids"], "labels": [token if one else -100 for token, one in pairs]}

    def encode(row: Mapping[str, Any]) -> dict[str, object]:
        (short,), count = _cut([whole(row)], config, reader)
        return {**short, TOKENS_CUT: count, IS_EMPTIED: False}

    rows = prepare_dataset(dataset, encode, desc="tokenizing")
    return report_truncation(rows, limit=f"max_length={config.max_length}")


COLUMNS = ("input_ids", "attention_mask", "labels")


def _check_lists(rows: Sequence[Any], others: Mapping[str, Sequence[Any] | None]) -> None:
    if len(rows) == 0 or isinstance(rows, str | Tensor):
        raise ValueError(f"step() got {type(rows).__name__} of {len(rows)}; a list with at least one row is needed.")
    for name, other in others.items():
        if other is not None and len(other) != len(rows):
            raise ValueError(f"step() got {len(rows)} rows and {len(other)} of {name}. Give one for each row.")


def _learning(tokenizer: PreTrainedTokenizerBase, text: str, target: str, i: int) -> dict[str, list[int]]:
    """A causal model's row: the tokens of `target` within `text` count, and EOS if `target` ends it."""
    if target == text:
        ids = encode_text(tokenizer, text)["input_ids"]
        return {"input_ids": ids, "labels": list(ids)}
    start = text.rfind(target)
    if start < 0:
        raise ValueError(
            f"texts_labels[{i}] is no part of texts[{i}], so its tokens have no place among the text's. Give the part "
            "that is to be learnt, or input_ids and labels."
        )
    end = start + len(target)
    encoded = encode_prompt_completion(tokenizer, text[:start], text[start:])
    ids, mask = encoded["input_ids"], encoded["completion_mask"]
    if end < len(text):  # what comes behind the target does not count
        rest = encode_prompt_completion(tokenizer, text[:end], text[end:])["completion_mask"]
        mask = [one and not behind for one, behind in zip(mask, rest, strict=True)]
    return {"input_ids": ids, "labels": [token if one else -100 for token, one in zip(ids, mask, strict=True)]}


def cut(rows: Rows, config: IterativeSFTConfig, reader: Reader) -> Rows:
    """The rows at most max_length tokens long, with one warning of how much was cut; raises as `_cut` does."""
    kept, count = _cut(rows, config, reader)
    if count:
        warnings.warn(
            f"max_length={config.max_length}: cut {count:,} tokens of {len(rows):,} rows; truncation_mode is "
            f"{config.truncation_mode!r}.",
            stacklevel=3,
        )
    return kept


def _cut(rows: Rows, config: IterativeSFTConfig, reader: Reader) -> tuple[Rows, int]:
    """The rows at most max_length tokens long, and how many tokens were cut.

    Raises ValueError for a row that holds nothing to learn, or is longer than the model's positions.
    """
    kept, count = [], 0
    for i, row in enumerate(rows):
        columns = (("input_ids",), ("labels",)) if reader.is_encoder_decoder else (("input_ids", "labels"),)
        short: dict[str, list[int]] = {}
        for own in columns:
            ids, mask = row[own[0]], [int(label != -100) for label in row[own[-1]]]
            result = truncate_row(ids, mask, max_length=config.max_length, mode=config.truncation_mode)  # type: ignore[arg-type]
            count += result.tokens_cut
            short[own[0]] = result.input_ids
            labels = [token if one else -100 for token, one in zip(result.input_ids, result.mask, strict=True)]
            short[own[-1]] = labels if own[-1] == "labels" else result.input_ids
        counted = short["labels"] if reader.is_encoder_decoder else short["labels"][1:]
        if all(label == -100 for label in counted):
            raise ValueError(
                f"Row {i} has no token that counts and that another predicts (max_length={config.max_length}). Leave "
                "the row out, raise max_length, or check its labels."
            )
        lengths = {"encoder": len(short["input_ids"]), "decoder": len(short["labels"])}
        remedy = f"Set max_length ({config.max_length}) to cut it, or leave it out."
        reader.positions.check(f"Row {i} is too long", **lengths, remedy=remedy)
        kept.append(short)
    return kept, count
