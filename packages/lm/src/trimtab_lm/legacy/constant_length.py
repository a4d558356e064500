"""The documented dataset that packs texts into rows of constant length."""

import math
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TypeAlias, cast

import torch
from torch.utils.data import get_worker_info
from transformers import PreTrainedTokenizerBase

from trimtab_lm.data.formats import Row
from trimtab_lm.data.kinds import check_texts
from trimtab_lm.data.tokenization import begins_with_bos
from trimtab_lm.interface import Batch

Token: TypeAlias = tuple[int, int, bool]
"""A token's id, its position in its text, and whether it counts."""

Document: TypeAlias = str | tuple[list[int], list[bool]]
"""A text, or the token ids of a text with their mask."""


class ConstantLengthDataset(torch.utils.data.IterableDataset[Batch]):
    """Packs texts, with EOS between them, into rows of `seq_length` tokens; no token is dropped.

    Rows are dicts of `input_ids`, `labels` and `position_ids` [seq_length]. Position ids start again at 0 with each
    text, so that in a model that gets no attention mask the texts do not attend to each other. Where a row is full, the
    text continues in the next row, without its earlier tokens as context. The last row is filled up with padding that
    does not count.

    `len` is the exact number of rows, so that a Trainer can train whole epochs. The first call tokenizes all texts to
    count them. Infinite data and streams have no length; they need max_steps.

    Args:
        dataset: an iterable of rows.
        dataset_text_field: the column of the texts.
        formatting_func: a function from a row to its text, instead of dataset_text_field. Without either the rows are
            tokenized: their `input_ids` count where their `labels`, if there are any, are not -100.
        infinite: whether to begin again at the end.
        num_of_sequences: texts of about so many rows are tokenized together, and their rows are shuffled.
        chars_per_token: how many characters make a token, for that estimate.
        eos_token_id: the EOS, for a tokenizer without one.
        shuffle: whether to shuffle, by a generator that depends on `seed` and the epoch alone.
        append_concat_token: whether to append EOS to each text.
        add_special_tokens: whether the tokenizer adds its special tokens, to texts that do not begin with BOS.

    Raises:
        ValueError: dataset_text_field and formatting_func came together, or a row has fewer than two tokens. The
            iterator raises it where a text is None.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        dataset: Iterable[Row],
        dataset_text_field: str | None = None,
        formatting_func: Callable[[Row], str] | None = None,
        infinite: bool = False,
        seq_length: int = 1024,
        num_of_sequences: int = 1024,
        chars_per_token: float = 3.6,
        eos_token_id: int = 0,
        shuffle: bool = True,
        append_concat_token: bool = True,
        add_special_tokens: bool = True,
        seed: int = 0,
    ):
        if dataset_text_field is not None and formatting_func is not None:
            raise ValueError("dataset_text_field and formatting_func both name the texts. Pass one of them.")
        if seq_length < 2:
            raise ValueError(f"seq_length={seq_length}: a row needs two tokens, one to predict the other. Raise it.")
        self.tokenizer, self.dataset, self.seq_length = tokenizer, dataset, seq_length
        self.is_tokenized = dataset_text_field is None and formatting_func is None
        self.read: Callable[[Row], Document] = formatting_func or itemgetter(dataset_text_field)
        if self.is_tokenized:
            self.read = _ids_and_counts
        self.infinite, self.shuffle, self.seed, self.epoch = infinite, shuffle, seed, 0
        self.concat_token_id = eos_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        self.append_concat_token, self.add_special_tokens = append_concat_token, add_special_tokens
        self.chars_per_token = chars_per_token
        self.buffer_characters = seq_length * chars_per_token * num_of_sequences
        self._length: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, on which the order of the rows depends."""
        self.epoch = epoch

    def __len__(self) -> int:
        if self.infinite or not isinstance(self.dataset, Sized):
            reason = "infinite=True repeats the data" if self.infinite else "The dataset is a stream"
            raise TypeError(f"{reason}, so its rows cannot be counted. Set max_steps instead of num_train_epochs.")
        if self._length is None:
            documents = (document for buffer in self._buffers() for document in self._encoded(buffer))
            self._length = math.ceil(sum(len(ids) for ids, _ in documents) / self.seq_length)
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        for number, row in enumerate(self._rows()):
            if worker is None or number % worker.num_workers == worker.id:
                yield row

    def _rows(self) -> Iterator[Batch]:
        """Yields all rows of an epoch, for all workers."""
        generator = torch.Generator().manual_seed((self.seed << 20) + self.epoch)
        held: list[Token] = []  # too few to fill a row
        for documents in self._buffers():
            for ids, counts in self._encoded(documents):
                held += zip(ids, range(len(ids)), counts, strict=True)
            full = len(held) // self.seq_length
            order = torch.randperm(full, generator=generator).tolist() if self.shuffle else range(full)
            for i in order:
                yield self._row(held[i * self.seq_length : (i + 1) * self.seq_length])
            held = held[full * self.seq_length :]
        if held:
            yield self._row(held)

    def _buffers(self) -> Iterator[list[Document]]:
        """Yields the documents that `read` returns, enough for about `num_of_sequences` rows at a time."""
        documents: list[Document] = []
        characters = 0.0
        while True:
            is_empty = True
            for row in self.dataset:
                is_empty = False
                document = self.read(row)
                if not self.is_tokenized:
                    check_texts("text", text=document)
                documents.append(document)
                characters += len(document[0]) * self.chars_per_token if self.is_tokenized else len(document)
                if characters >= self.buffer_characters:
                    yield documents
                    documents, characters = [], 0.0
            if is_empty:
                raise ValueError("The dataset of ConstantLengthDataset has no rows. Check its split and its filters.")
            if not self.infinite:
                break
        if documents:
            yield documents

    def _encoded(self, documents: list[Document]) -> Iterator[tuple[list[int], list[bool]]]:
        """Yields the token ids of each document, and their mask."""
        if self.is_tokenized:
            yield from cast(list[tuple[list[int], list[bool]]], documents)
            return
        for has_bos, texts in groupby(cast(list[str], documents), partial(begins_with_bos, self.tokenizer)):
            special = self.add_special_tokens and not has_bos
            for ids in self.tokenizer(list(texts), add_special_tokens=special)["input_ids"]:
                ends = bool(ids) and ids[-1] == self.concat_token_id
                closed = [*ids, self.concat_token_id] if self.append_concat_token and not ends else ids
                yield closed, [True] * len(closed)

    def _row(self, tokens: list[Token]) -> Batch:
        """Returns one full row of tokens. Positions start at 0 with each text and with the row."""
        missing = self.seq_length - len(tokens)
        ids = torch.tensor([token for token, _, _ in tokens] + [self.concat_token_id] * missing)
        place = torch.tensor([position for _, position, _ in tokens])
        counts = torch.tensor([counts for _, _, counts in tokens] + [False] * missing)
        index = torch.arange(len(tokens))
        starts = torch.where((place == 0) | (index == 0), index, 0).cummax(0).values
        positions = torch.cat([index - starts, torch.zeros(missing, dtype=torch.long)])
        labels = torch.where(counts & (positions > 0), ids, -100)
        return {"input_ids": ids, "labels": labels, "position_ids": positions}


def _ids_and_counts(row: Row) -> tuple[list[int], list[bool]]:
    """Returns the token ids of a tokenized row, and their mask."""
    if "input_ids" not in row:
        raise ValueError(
            f"Rows have the columns {list(row)} and no input_ids. Name the column of the texts with "
            "dataset_text_field, pass formatting_func, or tokenize the rows."
        )
    ids = list(row["input_ids"])
    return ids, [label != -100 for label in row.get("labels", ids)]
