"""Data for trainers that own their loop: tokenized prompts, and batches whose order survives a restart."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, default_collate
from transformers import PreTrainedTokenizerBase

from trimtab_lm.data.formats import Row, RowFormat, TemplateSettings, columns_of, prepare_dataset, row_format
from trimtab_lm.data.sources import as_data, is_stream
from trimtab_lm.data.tokenization import encode_prompt, renderer, template_settings
from trimtab_lm.data.truncation import report_truncation, truncate_columns
from trimtab_lm.tokens.positions import Positions

PROMPT_COLUMNS = ("query", "prompt")
KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text", ".arrow": "arrow"}
"""The endings of files of data, and what `datasets` calls their format."""
PROMPT_IDS = "prompt_ids"
"""The column of token ids that `tokenize_prompts` adds by default."""


def epoch_order(rows: int, per_batch: int, epoch: int, permutation: Callable[[int], list[int]]) -> list[int]:
    """Returns an epoch's row numbers: a permutation, or, if a batch has more rows, one batch from several permutations.

    Args:
        rows: the number of rows in the dataset, 1 or more.
        per_batch: the number of rows in a batch, over all processes.
        epoch: from 0.
        permutation: the order of all rows in a pass, by the number of the pass.
    """
    if rows >= per_batch:
        return permutation(epoch)
    first = epoch * per_batch
    passes = range(first // rows, (first + per_batch - 1) // rows + 1)
    stream = [row for number in passes for row in permutation(number)]
    return stream[first % rows : first % rows + per_batch]


class ShuffledBatches(Sampler[list[int]]):
    """Yields one process's batches of row numbers, from a new permutation each epoch; drops the remainder.

    Each process takes its own `batch_size` rows of every global batch. Where there are fewer rows than a global batch,
    an epoch is one batch, filled from as many permutations as it takes. `state_dict` says how far the epoch has come;
    after `load_state_dict` the next iteration goes on from there. Iterating again otherwise begins a new epoch.
    """

    def __init__(self, rows: int, batch_size: int, *, seed: int, rank: int, world_size: int):
        if rows == 0:
            raise ValueError(
                "The dataset has no rows: there is nothing to sample from. Check its filters and its split."
            )
        self.per_batch = batch_size * world_size
        self.per_epoch = max(rows // self.per_batch, 1)
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.epoch, self.taken = -1, self.per_epoch
        self._is_resumed = False
        self._order: tuple[int, list[int]] | None = None  # of the epoch of the last batch, with its number

    def __len__(self) -> int:
        return self.per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        if self._is_resumed:
            self._is_resumed = False
        else:
            self.epoch, self.taken = self.epoch + 1, 0
        while self.taken < self.per_epoch:
            self.taken += 1
            yield self._batch(self.epoch, self.taken - 1)

    def upcoming(self) -> list[int]:
        """The rows of the batch after the last one."""
        is_over = self.taken == self.per_epoch
        return self._batch(self.epoch + 1, 0) if is_over else self._batch(self.epoch, self.taken)

    def _batch(self, epoch: int, number: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, epoch_order(self.rows, self.per_batch, epoch, self._permutation)
        start = (number * self.world_size + self.rank) * self.batch_size
        return self._order[1][start : start + self.batch_size]

    def _permutation(self, number: int) -> list[int]:
        # Seeds that differ by 1 would give the permutations of neighbouring epochs to neighbouring runs.
        generator = torch.Generator().manual_seed((self.seed << 20) + number)
        return torch.randperm(self.rows, generator=generator).tolist()

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.taken = state["epoch"], state["taken"]
        self._is_resumed = self.epoch >= 0


def collate_columns(rows: Sequence[Any]) -> Any:
    """Turns rows into columns, which are lists; `input_ids` become 1-D tensors without padding.

    Rows without names, such as tuples, are collated as torch's DataLoader does by default.
    """
    if not isinstance(rows[0], Mapping):
        return default_collate(list(rows))
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    if "input_ids" in columns:
        columns["input_ids"] = [torch.as_tensor(ids, dtype=torch.long) for ids in columns["input_ids"]]
    return columns


def upcoming_queries(dataloader: DataLoader[Any]) -> list[Tensor]:
    """The queries of the batch after the last one, rows of token ids.

    Raises:
        ValueError: it is not.
    """
    batches = dataloader.batch_sampler
    if not isinstance(batches, ShuffledBatches) or dataloader.collate_fn is None:
        raise ValueError(
            "asynchronous_rollouts=True looks for the next batch in the order of PPOTrainer's own dataloader, and "
            "prepare_dataloader is overridden. Set asynchronous_rollouts=False, or leave it as it is."
        )
    return dataloader.collate_fn([dataloader.dataset[row] for row in batches.upcoming()])["input_ids"]


def open_dataset(name: str, split: str = "train", config: str | None = None) -> Dataset:
    """A split of a hub id, of a folder (also of `save_to_disk`), or of a json, csv, parquet or text file.

    Blank lines of a text file are no rows.

    Args:
        name: the dataset, the folder or the file.
        split: a split, or a part such as train[:90%]; a folder that `save_to_disk` wrote needs a whole split.
        config: the configuration of a dataset that has several, such as main of openai/gsm8k.

    Raises:
        ValueError: there is no such split or configuration, or several configurations and no `config`; a file has
            another ending, or a line of a .jsonl file is no JSON.
    """
    path = Path(name)
    is_saved = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
    if config is not None and (path.is_file() or is_saved):
        raise ValueError(f"{name} has no configurations, and {config!r} came as the name of one. Leave it out.")
    if path.is_file():
        return _open_file(path, split)
    if is_saved:
        stored = load_from_disk(name)
        splits = {"train": stored} if isinstance(stored, Dataset) else stored
        if split not in splits:
            raise ValueError(f"{name} has no split {split!r}; its splits are {', '.join(splits)}.")
        return splits[split]
    try:
        return load_dataset(name, config, split=split)
    except ValueError as error:
        known = re.search(r"Config name is missing.*?(\[.*?\])", str(error), re.DOTALL)
        if known is None:
            raise
        raise ValueError(
            f"{name} has the configurations {known[1]}. Name one: --dataset_config on the command line "
            "(--eval_dataset_config for eval_dataset), the second argument of load_dataset in Python."
        ) from error


def _open_file(path: Path, split: str) -> Dataset:
    if path.suffix not in KINDS:
        raise ValueError(f"{path} ends in {path.suffix!r}: files of data end in {', '.join(KINDS)}. Convert it.")
    try:
        rows = load_dataset(KINDS[path.suffix], data_files=str(path), split=split)
    except DatasetsError:
        if path.suffix == ".jsonl":
            _check_lines(path)
        raise
    if path.suffix != ".txt":
        return rows
    return rows.select([number for number, line in enumerate(rows["text"]) if line.strip()])


def _check_lines(path: Path) -> None:
    """Raises ValueError for the first line that is no JSON."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                json.loads(line if line.strip() else "null")
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}. Each line needs one JSON object.") from error


def refuse_stream(dataset: object, needed_for: str) -> None:
    """Raises TypeError for a stream."""
    if is_stream(dataset):
        raise TypeError(
            f"{needed_for} takes its prompts from a datasets.Dataset, not from a {type(dataset).__name__}: one call of "
            "generation serves several steps and processes, whose prompts are chosen by number, shuffled, and found "
            "again when training resumes. Read a stream's rows into one: Dataset.from_list(list(stream.take(n)))."
        )


def tokenize_prompts(
    dataset: object,
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_encoder_decoder: bool,
    needed_for: str,
    column: str = "prompt",
    into: str = PROMPT_IDS,
    max_length: int | None = None,
    max_completion_length: int = 0,
    positions: Positions | None = None,
    chat_template_kwargs: TemplateSettings | None = None,
    num_proc: int | None = None,
) -> Any:
    """The dataset with its prompts' tokens in one more column; all others stay, for the reward functions.

    A dataset with this column stays as it is. Drops an EOS that the tokenizer adds to a prompt, except for an encoder.

    Args:
        dataset: with a column of texts or conversations.
        is_encoder_decoder: whether an encoder reads the prompts.
        chat_template_kwargs: those of a row, in its column of this name, count before these.
        needed_for: the trainer's name for messages, such as "GRPO".
        into: the new column of token ids.
        max_length: longer prompts lose their beginning, but keep their BOS.
        max_completion_length: the maximum number of sampled tokens per prompt.
        positions: the model's positions; a prompt and its completion must fit into them.

    Raises:
        TypeError: the dataset is a stream, or no dataset at all.
        ValueError: the column is missing, a prompt is empty, or a prompt leaves no room for its completion.
    """
    if isinstance(dataset, Dataset) and into in dataset.column_names:
        return dataset
    refuse_stream(dataset, needed_for)
    data = as_data(dataset)
    if column == "prompt":
        row_format(columns_of(data), [RowFormat.PROMPT], needed_for=needed_for)
    bos = tokenizer.bos_token_id

    def encode(row: Row) -> dict[str, list[int]]:
        ids = encode_prompt(tokenizer, row[column], **template_settings(row, chat_template_kwargs))["input_ids"]
        if not ids:
            raise ValueError("The prompt is empty, and there is no token to continue from. Fill it or drop the row.")
        stops = [tokenizer.eos_token_id] if is_encoder_decoder else []
        prompt = truncate_columns({into: [*ids, *stops]}, {into: max_length}, mode="keep_end", bos_token_id=bos)
        if positions is not None:
            remedy = f"Lower max_prompt_length ({max_length}) or max_completion_length ({max_completion_length})."
            kind, length = {"is_encoder_decoder": is_encoder_decoder}, len(prompt[into])
            positions.check_sample(length, max_completion_length, **kind, remedy=remedy)
        return prompt

    rows = prepare_dataset(data, encode, keep=columns_of(data), num_proc=num_proc, desc="tokenizing prompts")
    return report_truncation(rows, limit=f"max_prompt_length={max_length}")


def as_queries(
    dataset: object, tokenizer: PreTrainedTokenizerBase, *, is_encoder_decoder: bool, num_proc: int | None = None
) -> Dataset:
    """The dataset with `input_ids` and `query` (text), from a `query` or `prompt` column of texts or conversations.

    A conversation goes through the tokenizer's chat template, with the mark of an answer to come. See
    `tokenize_prompts`.
    """
    data = as_data(dataset)
    columns = columns_of(data)
    column = next((name for name in PROMPT_COLUMNS if name in columns), None)
    if column is None:
        raise ValueError(
            f"The dataset has the columns {columns}, and none of input_ids, query or prompt. "
            "Rename the column with the prompts to 'query' (--columns query=... on the command line)."
        )
    options: dict[str, Any] = {"is_encoder_decoder": is_encoder_decoder, "needed_for": "PPO", "num_proc": num_proc}
    rows = tokenize_prompts(data, tokenizer, column=column, into="input_ids", **options)

    def add_text(row: Row) -> dict[str, object]:
        if isinstance(row[column], str):
            return {"query": row[column]}
        return {"query": renderer(tokenizer, **template_settings(row))(row[column], add_generation_prompt=True)}

    kept = [name for name in columns_of(rows) if name != column]
    return prepare_dataset(rows, add_text, keep=kept, num_proc=num_proc, desc="writing queries")
