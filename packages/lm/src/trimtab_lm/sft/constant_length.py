"""The documented packing into rows of constant length."""

from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from transformers import PreTrainedTokenizerBase


class ConstantLengthDataset(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """Texts one after the other, EOS between them, in rows of `seq_length` tokens; no token is dropped.

    Rows are dicts of `input_ids`, `labels` and `position_ids` [seq_length]. Position ids start again at 0 with every
    text, so that a model that gets no attention mask lets no text see another. A text goes on in the next row where one
    is full, without what it said before. The last row of all is filled up with padding that does not count.

    tokenizer, dataset: an iterable of rows. dataset_text_field, or formatting_func (row -> text): where the text is.
    infinite: begin again at the end. num_of_sequences, chars_per_token: texts of about so many rows (of so many
        characters per token) are tokenized at a time, and the rows of them shuffled.
    eos_token_id: for a tokenizer that has none. shuffle: with random numbers of its own, of `seed` and the pass over
        the data. append_concat_token: EOS behind each text. add_special_tokens: the tokenizer's own.
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
        if (dataset_text_field is None) == (formatting_func is None):
            raise ValueError("Give dataset_text_field or formatting_func, one of them, to say where the texts are.")
        self.tokenizer, self.dataset, self.seq_length = tokenizer, dataset, seq_length
        self.read = formatting_func or itemgetter(dataset_text_field)
        self.infinite, self.shuffle, self.seed, self.epoch = infinite, shuffle, seed, 0
        own = tokenizer.eos_token_id
        self.concat_token_id = eos_token_id if own is None else own
        self.append_concat_token, self.add_special_tokens = append_concat_token, add_special_tokens
        self.buffer_characters = seq_length * chars_per_token * num_of_sequences

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as in this pass over the data."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        for number, row in enumerate(self._rows()):
            if worker is None or number % worker.num_workers == worker.id:
                yield row

    def _rows(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed((self.seed << 20) + self.epoch)
        held: list[tuple[int, int]] = []  # (id, position in its text) of tokens that fill no row yet
        for texts in self._buffers():
            held += [pair for ids in self._tokenized(texts) for pair in zip(ids, range(len(ids)), strict=True)]
            full = len(held) // self.seq_length
            order = torch.randperm(full, generator=generator).tolist() if self.shuffle else range(full)
            for i in order:
                yield self._row(held[i * self.seq_length : (i + 1) * self.seq_length])
            held = held[full * self.seq_length :]
        if held:
            yield self._row(held)

    def _buffers(self) -> Iterator[list[str]]:
        texts: list[str] = []
        characters = 0
        while True:
            is_empty = True
            for row in self.dataset:
                is_empty = False
                texts.append(self.read(row))
                characters += len(texts[-1])
                if characters >= self.buffer_characters:
                    yield texts
                    texts, characters = [], 0
            if is_empty:
                raise ValueError("The data set of ConstantLengthDataset has no rows.")
            if not self.infinite:
                break
        if texts:
            yield texts

    def _tokenized(self, texts: list[str]) -> Iterator[list[int]]:
        for ids in self.tokenizer(texts, add_special_tokens=self.add_special_tokens)["input_ids"]:
            ends = bool(ids) and ids[-1] == self.concat_token_id
            yield [*ids, self.concat_token_id] if self.append_concat_token and not ends else ids

    def _row(self, tokens: list[tuple[int, int]]) -> dict[str, Tensor]:
        """One row; positions start at 0 where a text does, and where the row does."""
        missing = self.seq_length - len(tokens)
        ids = torch.tensor([token for token, _ in tokens] + [self.concat_token_id] * missing)
        place = torch.tensor([position for _, position in tokens])
        index = torch.arange(len(tokens))
        starts = torch.where((place == 0) | (index == 0), index, 0).cummax(0).values
        positions = torch.cat([index - starts, torch.zeros(missing, dtype=torch.long)])
        labels = torch.where((positions == 0), -100, ids)
        return {"input_ids": ids, "labels": labels, "position_ids": positions}
