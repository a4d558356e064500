"""Labelled answers for KTO: rows of a dataset as token ids.

A tokenized row has `prompt_input_ids`, `completion_input_ids` and `label`, True where the completion is desirable.
"""

import warnings
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from trimtab_lm.data.formats import Row, RowFormat, Text, columns_of, preference_parts, prepare_dataset, row_format
from trimtab_lm.data.sources import as_data
from trimtab_lm.data.tokenization import encode_prompt_completion, encode_seq2seq, stop_token_ids, template_settings
from trimtab_lm.data.truncation import (
    IS_EMPTIED,
    IS_TIE,
    TOKENS_CUT,
    drop_ties,
    limits_in_words,
    report_truncation,
    truncate_answers,
    truncate_columns,
)
from trimtab_lm.hf.types import DataSource
from trimtab_lm.interface import Data
from trimtab_lm.tokens.positions import Positions

from .config import KTOConfig

FORMATS = (RowFormat.UNPAIRED_PREFERENCE, RowFormat.PREFERENCE, RowFormat.IMPLICIT_PREFERENCE)
SIDES, TOKENS = ("chosen_", "rejected_"), ("prompt_input_ids", "completion_input_ids")
"""How the columns of a pair's answers begin, and the columns of a row's tokens."""
MOST = 4 / 3


@dataclass(frozen=True)
class AnswerTokenizer:
    """A row with a prompt, a completion and a label as token ids, with the counts for `report_truncation`."""

    tokenizer: PreTrainedTokenizerBase
    config: KTOConfig
    is_encoder_decoder: bool
    positions: Positions

    def __call__(self, row: Row) -> dict[str, Any]:
        """Returns the columns.

        Raises:
            ValueError: the label is no bool, the completion is empty, the prompt has no token, or the row has more
                tokens than the model has positions.
        """
        if not isinstance(label := row.get("label"), bool):
            raise ValueError(
                f"The label is {label!r} ({type(label).__name__}): True, for a desirable completion, or False is "
                "needed. Write true or false into the file, or convert the column: dataset.cast_column('label', "
                "datasets.Value('bool'))."
            )
        settings = template_settings(row)
        encode = self._seq2seq if self.is_encoder_decoder else self._causal
        cut, length = encode(row["prompt"], row["completion"], settings)
        remedy = f"Lower max_length ({self.config.max_length}), or drop the row."
        encoder = len(cut["prompt_input_ids"]) if self.is_encoder_decoder else 0
        self.positions.check("The row is too long", encoder=encoder, decoder=length, remedy=remedy)
        return {**cut, "label": label}

    def of_pair(self, row: Row) -> dict[str, Any]:
        """Returns the columns of both answers of a pair, after their SIDES, and the column that `drop_ties` reads."""
        prompt, *answers = preference_parts(row)
        columns: dict[str, Any] = {}
        for side, answer in zip(SIDES, answers, strict=True):
            encoded = self({**row, "prompt": prompt, "completion": answer, "label": side == "chosen_"})
            columns |= {side + name: value for name, value in encoded.items()}
        is_tie = all(columns[f"chosen_{name}"] == columns[f"rejected_{name}"] for name in TOKENS)
        return {**columns, IS_TIE: is_tie}

    def _causal(self, prompt: Text, completion: Text, settings: dict[str, Any]) -> tuple[dict[str, Any], int]:
        encoded = encode_prompt_completion(self.tokenizer, prompt, completion, **settings)
        ids, start = encoded["input_ids"], encoded["completion_mask"].index(1)
        if start == 0:
            raise ValueError(
                "The prompt has no token, and the first token of a completion needs one before it to be scored. Give "
                "the row a prompt, or use a tokenizer that adds BOS."
            )
        limits: dict[str, Any] = {"max_prompt_length": self.config.max_prompt_length, **self._cuts}
        row = {"prompt_input_ids": ids[:start], "completion_input_ids": ids}
        cut = truncate_answers(row, max_length=self.config.max_length, **limits)
        whole = cut["completion_input_ids"]
        return {**cut, "completion_input_ids": whole[len(cut["prompt_input_ids"]) :]}, len(whole)

    def _seq2seq(self, prompt: Text, completion: Text, settings: dict[str, Any]) -> tuple[dict[str, Any], int]:
        encoded = encode_seq2seq(self.tokenizer, prompt, completion, **settings)
        most = self.config.max_length
        shorter = min((x for x in (self.config.max_prompt_length, most) if x is not None), default=None)
        row = {"prompt_input_ids": encoded["input_ids"], "completion_input_ids": encoded["labels"]}
        cut = truncate_columns(row, dict(zip(row, (shorter, most), strict=True)), **self._cuts)
        return cut, len(cut["completion_input_ids"])

    @property
    def _cuts(self) -> dict[str, Any]:
        stops = {"bos_token_id": self.tokenizer.bos_token_id, "stop_ids": stop_token_ids(self.tokenizer)}
        return {"mode": self.config.truncation_mode, **stops}


def tokenize_answers(dataset: DataSource, tokenize: AnswerTokenizer) -> Data:
    """The rows as token ids. Pairs become two rows each: all chosen answers, then all rejected ones.

    Pairs whose answers have the same tokens are dropped, with a warning.

    Raises:
        ValueError: columns are missing, a row cannot be used (the message says which), a stream has pairs, or no pair
            is left.
    """
    dataset, limit = as_data(dataset), limits_in_words(tokenize.config, ("max_length", "max_prompt_length"))
    options: dict[str, Any] = {"num_proc": tokenize.config.dataset_num_proc, "desc": "tokenizing"}
    if row_format(columns_of(dataset), FORMATS, needed_for="KTO") is RowFormat.UNPAIRED_PREFERENCE:
        rows = prepare_dataset(dataset, tokenize, **options)
    elif isinstance(dataset, Dataset):
        pairs = drop_ties(prepare_dataset(dataset, tokenize.of_pair, **options), limit=limit)
        names = [{side + name: name for name in (*TOKENS, "label", TOKENS_CUT, IS_EMPTIED)} for side in SIDES]
        rows = concatenate_datasets([pairs.select_columns([*one]).rename_columns(one) for one in names])
    else:
        raise ValueError(
            "This stream has pairs, and KTO needs rows of prompt, completion and label; it splits the pairs of data "
            "sets alone. Load it without streaming, or split the pairs with dataset.map."
        )
    return report_truncation(rows, limit=limit)


def warn_of_balance(rows: object, config: KTOConfig) -> None:
    """Warns where the weighted numbers of desirable and undesirable rows are not as the paper recommends.

    Ethayarajh et al. 2024, arXiv:2402.01306, Eq. 9: lambda_D n_D / (lambda_U n_U) lies between 1 and 4/3. The rows of a
    stream cannot be counted.
    """
    if not isinstance(rows, Dataset):
        return
    good = sum(rows["label"])
    bad = len(rows) - good
    if not good or not bad:
        kind = "desirable" if good else "undesirable"
        warnings.warn(f"All {len(rows):,} rows are {kind}, so nothing contrasts with them. Add others.", stacklevel=4)
        return
    share = config.desirable_weight * good / (config.undesirable_weight * bad)
    if not 1 - 1e-6 <= share <= MOST + 1e-6:
        least = config.undesirable_weight * bad / good
        warnings.warn(
            f"{good:,} desirable and {bad:,} undesirable rows, times their weights, have the ratio {share:.3g}; the "
            f"paper recommends 1 to 4/3. Set desirable_weight between {least:.3g} and {MOST * least:.3g}, or "
            "undesirable_weight in proportion.",
            stacklevel=4,
        )
