"""Preference pairs for DPO: rows of a dataset as token columns.

A tokenized pair has the documented columns. Decoders: `prompt_input_ids`, `{chosen,rejected}_input_ids` (the
prompt and the answer) and `{chosen,rejected}_labels` (label_pad_token_id on the prompt). Encoder-decoder models:
`prompt_input_ids` and `{chosen,rejected}_labels`, the answers. Beside each `*_input_ids` an `*_attention_mask`.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from trimtab_common.overrides import source_of
from trimtab_common.sharding import placed, reshard
from trimtab_lm.data.formats import (
    Row,
    RowFormat,
    Text,
    columns_of,
    numbered,
    preference_parts,
    prepare_dataset,
    row_format,
)
from trimtab_lm.data.sources import as_data
from trimtab_lm.data.tokenization import (
    Columns,
    closed,
    encode_preference,
    encode_preference_seq2seq,
    encode_prompt_completion,
    require_eos,
    stop_token_ids,
    template_settings,
)
from trimtab_lm.data.truncation import (
    IS_TIE,
    TOKENS_CUT,
    Mode,
    drop_ties,
    limits_in_words,
    report_truncation,
    truncate_answers,
    truncate_columns,
)
from trimtab_lm.hf.adapter import prepare_datasets, shard_model
from trimtab_lm.hf.types import DataSource
from trimtab_lm.tokens.positions import Positions

from .chain2024 import SCORING
from .collator import REFERENCE_COLUMNS, SIDES
from .precompute import ReferenceCache

LIMITS = ("max_length", "max_prompt_length", "max_target_length")
SETTINGS = (*LIMITS, "truncation_mode", "label_pad_token_id")
"""The settings of DPOConfig by which pairs become tokens."""


@dataclass(frozen=True)
class PairTokenizer:
    """A row with a preference, standard or conversational, as token columns; the order of cuts is `truncate_answers`'s.

    max_target_length cuts the answers before anything else. Of an encoder-decoder model max_length holds for prompt
    and answers each.
    """

    tokenizer: PreTrainedTokenizerBase
    is_encoder_decoder: bool
    max_length: int | None = None
    max_prompt_length: int | None = None
    max_target_length: int | None = None
    truncation_mode: Mode = "keep_end"
    label_pad_token_id: int = -100
    positions: Positions | None = None
    """Of the model; ValueError for a pair that is longer after the cut."""
    build: Callable[[Text, Text], Columns] | None = None
    """Takes the place of `split`."""

    def __post_init__(self) -> None:
        require_eos(self.tokenizer)

    @property
    def limits(self) -> str:
        """The limits in one line, for messages."""
        return limits_in_words(self, LIMITS)

    def __call__(self, row: Row) -> dict[str, object]:
        """The token columns of a row, and the columns that `report_truncation` and `drop_ties` read."""
        settings = template_settings(row)
        if self.is_encoder_decoder:
            return self._seq2seq(encode_preference_seq2seq(self.tokenizer, row, **settings))
        encoded, cut = self._shorter_answers(self._encoded(row, settings))
        pair = truncate_answers(
            encoded,
            max_length=self.max_length,
            max_prompt_length=self.max_prompt_length,
            mode=self.truncation_mode,
            bos_token_id=self.tokenizer.bos_token_id,
            stop_ids=stop_token_ids(self.tokenizer),
        )
        start = len(pair["prompt_input_ids"])
        for side in SIDES:
            pair[f"{side}_labels"] = [self.label_pad_token_id] * start + pair[f"{side}_input_ids"][start:]
        self.check_length(pair)
        is_tie = pair["chosen_input_ids"] == pair["rejected_input_ids"]
        return _with_masks(pair | {TOKENS_CUT: pair[TOKENS_CUT] + cut, IS_TIE: is_tie})

    def _encoded(self, row: Row, settings: dict[str, Any]) -> Columns:
        if self.build is None:
            return encode_preference(self.tokenizer, row, **settings)
        if given := [name for name, value in settings.items() if value]:
            raise ValueError(
                f"A replaced build_tokenized_answer gets a prompt and an answer, and no {' or '.join(given)}. Drop "
                "the columns, or replace tokenize_row."
            )
        return encode_preference(self.tokenizer, row, encode=self._built)

    def _built(self, prompt: Text, answer: Text) -> Columns:
        parts = cast(Callable[[Text, Text], Columns], self.build)(prompt, answer)
        head, ids = list(parts["prompt_input_ids"]), list(parts["input_ids"])
        is_templated, mask = not isinstance(prompt, str), [0] * len(head) + [1] * len(ids)
        ids, mask = closed(self.tokenizer, head + ids, mask, is_templated=is_templated)
        return {"input_ids": ids, "completion_mask": mask}

    def check_length(self, pair: Mapping[str, Sequence[int]]) -> None:
        """Raise ValueError for a tokenized pair with a text longer than the model's positions."""
        if self.positions is None:
            return
        remedy = f"Lower max_length ({self.max_length}), or drop the pair."
        if self.is_encoder_decoder:
            self.positions.check("The prompt is too long", encoder=len(pair["prompt_input_ids"]), remedy=remedy)
        for side in SIDES:
            length = len(pair[f"{side}_labels"])  # a decoder's labels cover the prompt too
            self.positions.check(f"The {side} answer is too long", decoder=length, remedy=remedy)

    def row(self, row: Row, model: Any = None) -> dict[str, object]:
        """The token columns alone.

        model: an encoder-decoder, which makes `{chosen,rejected}_decoder_input_ids` of the labels.
        """
        columns = {
            name: value for name, value in self(row).items() if name.endswith(("_input_ids", "_mask", "_labels"))
        }
        if model is not None and self.is_encoder_decoder:
            for side in SIDES:
                labels = torch.tensor(columns[f"{side}_labels"])[None]
                ids = model.prepare_decoder_input_ids_from_labels(labels=labels)
                columns[f"{side}_decoder_input_ids"] = ids[0].tolist()
        return columns

    def split(self, prompt: Text, answer: Text) -> dict[str, list[int]]:
        """`prompt_input_ids` and the answer's `input_ids`, with masks: enc(prompt + answer), split where the answer
        begins; nothing is added to it and nothing cut."""
        encoded = encode_prompt_completion(self.tokenizer, prompt, answer, add_eos=False)
        ids, start = encoded["input_ids"], encoded["completion_mask"].index(1)
        parts = {"prompt_input_ids": ids[:start], "prompt_attention_mask": [1] * start}
        return parts | {"input_ids": ids[start:], "attention_mask": [1] * (len(ids) - start)}

    def _shorter_answers(self, encoded: Mapping[str, list[int]]) -> tuple[dict[str, list[int]], int]:
        """The pair with answers of at most max_target_length, and the number of removed tokens."""
        prompt, names = encoded["prompt_input_ids"], [f"{side}_input_ids" for side in SIDES]
        answers = {name: encoded[name][len(prompt) :] for name in names}
        limits = dict.fromkeys(names, self.max_target_length)
        stops = stop_token_ids(self.tokenizer)
        cut = truncate_columns(answers, limits, mode=self.truncation_mode, stop_ids=stops)
        return {"prompt_input_ids": prompt, **{name: prompt + cut[name] for name in names}}, cut[TOKENS_CUT]

    def _seq2seq(self, encoded: Mapping[str, list[int]]) -> dict[str, object]:
        def limit(own: int | None) -> int | None:
            return min((x for x in (own, self.max_length) if x is not None), default=None)

        limits = {"prompt_input_ids": limit(self.max_prompt_length)}
        limits |= {f"{side}_input_ids": limit(self.max_target_length) for side in SIDES}
        pair = truncate_columns(
            encoded,
            limits,
            mode=self.truncation_mode,
            bos_token_id=self.tokenizer.bos_token_id,
            stop_ids=stop_token_ids(self.tokenizer),
        )
        pair |= {f"{side}_labels": pair.pop(f"{side}_input_ids") for side in SIDES}
        self.check_length(pair)
        return _with_masks(pair | {IS_TIE: pair["chosen_labels"] == pair["rejected_labels"]})


def _with_masks(pair: dict[str, Any]) -> dict[str, object]:
    masks = {
        name.replace("input_ids", "attention_mask"): [1] * len(ids)
        for name, ids in pair.items()
        if name.endswith("_input_ids")
    }
    return pair | masks


def tokenize_pairs(
    dataset: Dataset | IterableDataset,
    tokenize: PairTokenizer,
    *,
    keep_columns: bool = False,
    num_proc: int | None,
    tokenize_row: Callable[[Row], Mapping[str, object]] | None = None,
) -> Dataset | IterableDataset:
    """The dataset's pairs as token columns, without those whose answers have the same tokens.

    A tokenized dataset is returned unchanged, and so are the rows of a replaced `tokenize_row`.

    keep_columns: keep the columns that were there, for a collator that reads them. tokenize_row: takes the place of
    `tokenize`; it gets the columns of a row, its prompt among them.

    Raises TypeError for what is no dataset of `datasets`, ValueError for columns that are missing, for a row that
    cannot be used (it says which), and where no pair is left.
    """
    dataset = as_data(dataset)
    columns = columns_of(dataset)
    names = {"prompt_input_ids", *(f"{side}_labels" for side in SIDES)}
    if not tokenize.is_encoder_decoder:
        names |= {f"{side}_input_ids" for side in SIDES}
    if names <= set(columns):
        if isinstance(dataset, Dataset) and tokenize.positions is not None and tokenize.positions.is_limited:
            for number, row in enumerate(dataset.select_columns(sorted(names)).with_format(None)):
                numbered(tokenize.check_length, row, number)
        return dataset
    keep = columns if keep_columns else [name for name in REFERENCE_COLUMNS if name in columns]
    options: dict[str, Any] = {"keep": keep, "num_proc": num_proc, "desc": "tokenizing"}
    if tokenize_row is not None or tokenize.build is not None:  # methods of a trainer, which has no hash and no copy
        options |= {"num_proc": None, "new_fingerprint": uuid.uuid4().hex}
    if tokenize_row is not None:
        return prepare_dataset(dataset, partial(_with_prompt, tokenize_row), **options)
    row_format(columns, (RowFormat.PREFERENCE, RowFormat.IMPLICIT_PREFERENCE), needed_for="DPO")
    pairs = report_truncation(prepare_dataset(dataset, tokenize, **options), limit=tokenize.limits)
    return drop_ties(pairs, limit=tokenize.limits)


def _with_prompt(tokenize_row: Callable[[Row], Mapping[str, object]], row: Row) -> Mapping[str, object]:
    """What a replaced method makes of a row, with the prompt that both answers may hold in their beginnings."""
    parts = preference_parts(row) if {"chosen", "rejected"} <= row.keys() else ()
    return tokenize_row({**row, **dict(zip(("prompt", "chosen", "rejected"), parts, strict=False))})


class Datasets:
    """The datasets of a DPOTrainer: the caller's, and the ones prepared with present settings and methods."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.given: list[Any] = [None, None]  # the training set and the evaluation sets
        self.prepared: list[Any] = [None, None]
        self.prepared_by: object = None
        self.open_cache()

    def open_cache(self) -> None:
        """Open the cache of the reference's log-probabilities, if they are to be precomputed."""
        trainer = self.trainer
        self.cache: ReferenceCache | None = None
        if trainer.config.precompute_ref_log_probs and trainer.reference is not None:
            if trainer.reference.model is trainer.model:
                shard_model(trainer)
            precision = trainer.accelerator.mixed_precision
            self.cache = ReferenceCache(trainer.reference, trainer.config.cache_folder, precision=precision)

    @property
    def tokenizer(self) -> PairTokenizer:
        """The function that tokenizes a row with the present settings."""
        trainer = self.trainer
        return PairTokenizer(
            trainer.tokenizer,
            trainer.is_encoder_decoder,
            **{name: getattr(trainer.config, name) for name in SETTINGS},
            positions=trainer.positions,
            build=trainer.build_tokenized_answer if trainer.chain.replaces("build_tokenized_answer") else None,
        )

    @property
    def preparation(self) -> tuple[object, ...]:
        """Everything that the columns of a prepared dataset depend on."""
        trainer = self.trainer
        scores = () if self.cache is None else tuple(getattr(trainer, name) for name in SCORING)
        return self.tokenizer, trainer.chain.runs, trainer.tokenize_row, self.cache, scores

    def update(self) -> None:
        """Prepare the datasets, again if the caller has replaced one, or a setting or method that prepares them."""
        trainer = self.trainer
        current = [trainer.train_dataset, trainer.eval_dataset]
        kept = [now is prepared for now, prepared in zip(current, self.prepared, strict=True)]
        if all(kept) and self.preparation == self.prepared_by:
            return
        self.given = [given if is_kept else now for given, is_kept, now in zip(self.given, kept, current, strict=True)]
        trainer.train_dataset, trainer.eval_dataset = self.given
        prepare_datasets(trainer)
        self.prepared, self.prepared_by = [trainer.train_dataset, trainer.eval_dataset], self.preparation

    def tokenized(self, dataset: DataSource) -> Dataset | IterableDataset:
        """A dataset as token columns; a tokenized one is returned unchanged."""
        trainer = self.trainer
        return tokenize_pairs(
            dataset,
            self.tokenizer,
            keep_columns=trainer.keeps_columns or trainer.chain.runs,  # replaced methods read them in batches
            num_proc=trainer.config.dataset_num_proc,
            tokenize_row=trainer.tokenize_row if trainer.chain.replaces("tokenize_row") else None,
        )

    def with_reference(self, dataset: Any) -> Any:
        """A tokenized dataset with the reference's log-probabilities, where they are precomputed. Collective."""
        trainer, cache = self.trainer, self.cache
        if dataset is None or cache is None or set(REFERENCE_COLUMNS) <= set(dataset.column_names or ()):
            return dataset
        dataset = cache.with_columns(
            dataset,
            trainer.compute_reference_log_probs,
            trainer.data_collator,
            batch_size=trainer.config.per_device_eval_batch_size,
            rank=trainer.config.process_index,
            code=source_of(trainer, trainer.chain.documented, *SCORING),
        )
        reshard(cache.reference.model)
        self.set_reference_aside()
        return dataset

    def set_reference_aside(self) -> None:
        """Move a reference whose log-probabilities are precomputed to the CPU; it leaves its memory to training."""
        fixed = None if self.cache is None else self.cache.reference
        if fixed is not None and fixed.model is not self.trainer.model and not fixed.is_policy:
            placed(fixed.model, "cpu")
