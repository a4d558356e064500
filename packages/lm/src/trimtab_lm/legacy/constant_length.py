"""The documented packing into rows of constant length."""

import math
from collections.abc import Callable, Iterable, Iterator, Sized
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from transformers import PreTrainedTokenizerBase

Token = tuple[int, int, bool]
"""Its id, its position in its text, and whether it counts."""


class ConstantLengthDataset(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """Texts one after the other, EOS between them, in rows of `seq_length` tokens; no token is dropped.

    Rows are dicts of `input_ids`, `labels` and `position_ids` [seq_length]. Position ids start again at 0 with every
    text, so that a model that gets no attention mask lets no text see another. A text goes on in the next row where one
    is full, without what it said before. The last row of all is filled up with padding that does not count.

    tokenizer, dataset: an iterable of rows. dataset_text_field, or formatting_func (row -> text): where the text is;
        without either the rows are tokenized: their `input_ids` are taken as they are, and count where `labels` (if
        there are any) are not -100.
    infinite: begin again at the end. num_of_sequences, chars_per_token: texts of about so many rows (of so many
        characters per token) are tokenized at a time, and the rows of them shuffled.
    eos_token_id: for a tokenizer that has none. shuffle: with random numbers of its own, of `seed` and the pass over
        the data. append_concat_token: EOS behind each text. add_special_tokens: the tokenizer's own.

    `len` is the exact number of rows, so that a Trainer can train whole epochs. The first call tokenizes all texts to
    count them. Endless data and streams have no length: they need max_steps.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        dataset: Iterable[dict[str, Any]],
        dataset_text_field: str | None = None,
        formatting_func: Callable[[dict[str, Any]], str] | None = None,
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
            raise ValueError("dataset_text_field and formatting_func both say where the texts are. Give one of them.")
        self.tokenizer, self.dataset, self.seq_length = tokenizer, dataset, seq_length
        self.is_tokenized = dataset_text_field is None and formatting_func is None
        self.read: Callable[[dict[str, Any]], Any] = formatting_func or itemgetter(dataset_text_field)
        if self.is_tokenized:
            self.read = _ids_and_counts
        self.infinite, self.shuffle, self.seed, self.epoch = infinite, shuffle, seed, 0
        own = tokenizer.eos_token_id
        self.concat_token_id = eos_token_id if own is None else own
        self.append_concat_token, self.add_special_tokens = append_concat_token, add_special_tokens
        self.chars_per_token = chars_per_token
        self.buffer_characters = seq_length * chars_per_token * num_of_sequences
        self._length: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as in this pass over the data."""
        self.epoch = epoch

    def __len__(self) -> int:
        if self.infinite or not isinstance(self.dataset, Sized):
            what = "infinite=True has no end" if self.infinite else "The dataset is a stream"
            raise TypeError(f"{what}, so its rows cannot be counted. Set max_steps instead of num_train_epochs.")
        if self._length is None:
            documents = (document for buffer in self._buffers() for document in self._encoded(buffer))
            self._length = math.ceil(sum(len(ids) for ids, _ in documents) / self.seq_length)
        return self._length

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        for number, row in enumerate(self._rows()):
            if worker is None or number % worker.num_workers == worker.id:
                yield row

    def _rows(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed((self.seed << 20) + self.epoch)
        held: list[Token] = []  # of tokens that fill no row yet
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

    def _buffers(self) -> Iterator[list[Any]]:
        """What `read` gives for each row, about `num_of_sequences` rows of output at a time."""
        documents: list[Any] = []
        characters = 0.0
        while True:
            is_empty = True
            for row in self.dataset:
                is_empty = False
                document = self.read(row)
                documents.append(document)
                characters += len(document[0]) * self.chars_per_token if self.is_tokenized else len(document)
                if characters >= self.buffer_characters:
                    yield documents
                    documents, characters = [], 0.0
            if is_empty:
                raise ValueError("The data set of ConstantLengthDataset has no rows.")
            if not self.infinite:
                break
        if documents:
            yield documents

    def _encoded(self, documents: list[Any]) -> Iterator[tuple[list[int], list[bool]]]:
        """Token ids of each document, and which of them count."""
        if self.is_tokenized:
            yield from documents
            return
        for ids in self.tokenizer(documents, add_special_tokens=self.add_special_tokens)["input_ids"]:
            ends = bool(ids) and ids[-1] == self.concat_token_id
            closed = [*ids, self.concat_token_id] if self.append_concat_token and not ends else ids
            yield closed, [True] * len(closed)

    def _row(self, tokens: list[Token]) -> dict[str, Tensor]:
        """One row; positions start at 0 where a text does, and where the row does."""
        missing = self.seq_length - len(tokens)
        ids = torch.tensor([token for token, _, _ in tokens] + [self.concat_token_id] * missing)
        place = torch.tensor([position for _, position, _ in tokens])
        counts = torch.tensor([counts for _, _, counts in tokens] + [False] * missing)
        index = torch.arange(len(tokens))
        starts = torch.where((place == 0) | (index == 0), index, 0).cummax(0).values
        positions = torch.cat([index - starts, torch.zeros(missing, dtype=torch.long)])
        labels = torch.where(counts & (positions > 0), ids, -100)
        return {"input_ids": ids, "labels": labels, "position_ids": positions}


def _ids_and_counts(row: dict[str, Any]) -> tuple[list[int], list[bool]]:
    if "input_ids" not in row:
        raise ValueError(
            f"Rows have the columns {list(row)} and no input_ids. Say where the texts are, by dataset_text_field or "
            "formatting_func, or tokenize the rows."
        )
    ids = list(row["input_ids"])
    return ids, [label != -100 for label in row.get("labels", ids)]
