"""Data for trainers that own their loop: tokenized prompts, and batches whose order survives a restart."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset, load_from_disk
from torch import nn
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase

PROMPT_COLUMNS = ("query", "prompt")
KEPT_COLUMNS = (*PROMPT_COLUMNS, "label", "response")


class ShuffledBatches(Sampler[list[int]]):
    """Index batches of one process: every epoch a new permutation, made from (seed, epoch), without a remainder.

    Each process takes its own `batch_size` rows of every global batch. `state_dict` says how far the epoch has come;
    after `load_state_dict` the next iteration goes on from there. Iterating again otherwise begins a new epoch.
    """

    def __init__(self, rows: int, batch_size: int, *, seed: int, rank: int, world_size: int):
        self.per_epoch = rows // (batch_size * world_size)
        if self.per_epoch == 0:
            raise ValueError(
                f"The dataset has {rows} rows, fewer than one batch of {batch_size} on each of {world_size} processes. "
                "Add rows, or lower batch_size."
            )
        self.rows, self.batch_size, self.seed, self.rank, self.world_size = (
            rows,
            batch_size,
            seed,
            rank,
            world_size,
        )
        self.epoch, self.taken = -1, self.per_epoch
        self._is_resumed = False

    def __len__(self) -> int:
        return self.per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        if self._is_resumed:
            self._is_resumed = False
        else:
            self.epoch, self.taken = self.epoch + 1, 0
        # Seeds that differ by 1 would give the permutations of neighbouring epochs to neighbouring runs.
        generator = torch.Generator().manual_seed((self.seed << 20) + self.epoch)
        order = torch.randperm(self.rows, generator=generator).tolist()
        while self.taken < self.per_epoch:
            start = (self.taken * self.world_size + self.rank) * self.batch_size
            self.taken += 1
            yield order[start : start + self.batch_size]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.taken = state["epoch"], state["taken"]
        self._is_resumed = self.epoch >= 0


def collate_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows to columns, each a list; `input_ids` become 1-D tensors of their own lengths."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    if "input_ids" in columns:
        columns["input_ids"] = [torch.as_tensor(ids, dtype=torch.long) for ids in columns["input_ids"]]
    return columns


def used_columns(dataset: Dataset, model: nn.Module) -> Dataset:
    """The dataset with the arguments of the model's forward, queries, responses and labels alone."""
    known = {*inspect.signature(model.forward).parameters, *KEPT_COLUMNS}
    unused = [name for name in dataset.column_names if name not in known]
    return dataset.remove_columns(unused)


def open_dataset(name: str) -> Dataset:
    """The train split of a hub id, of a folder that `save_to_disk` wrote, or of a json, csv, parquet or text file."""
    path = Path(name)
    if path.is_file():
        kind = {".jsonl": "json", ".txt": "text"}.get(path.suffix, path.suffix[1:])
        return load_dataset(kind, data_files=name, split="train")
    if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
        stored = load_from_disk(name)
        return stored if isinstance(stored, Dataset) else stored["train"]
    return load_dataset(name, split="train")


def tokenize_prompts(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """The dataset with `input_ids` and `query` (text), from a `query` or `prompt` column of texts or conversations.

    A dataset that has `input_ids` already is only given its `query` texts, if it has none. A conversation goes through
    the tokenizer's chat template, with the mark of an answer to come.
    """
    if "input_ids" in dataset.column_names:
        if "query" in dataset.column_names:
            return dataset
        return dataset.map(lambda row: {"query": tokenizer.decode(row["input_ids"])}, desc="decoding queries")
    column = next((name for name in PROMPT_COLUMNS if name in dataset.column_names), None)
    if column is None:
        raise ValueError(
            f"The dataset has the columns {dataset.column_names}, and none of input_ids, query or prompt. "
            "Rename the column with the prompts to 'query'."
        )

    def encode(row: dict[str, Any]) -> dict[str, Any]:
        prompt = row[column]
        if isinstance(prompt, str):
            return {"query": prompt, "input_ids": tokenizer(prompt)["input_ids"]}
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        # The template writes its own special tokens: adding them again would double the BOS.
        return {"query": text, "input_ids": tokenizer(text, add_special_tokens=False)["input_ids"]}

    return dataset.map(encode, remove_columns=[column], desc="tokenizing prompts")


RewardFunction = Callable[..., Sequence[float]]
"""reward(queries: list[str], responses: list[str], **columns) -> one score per response."""
