"""Computes the reference's log-probabilities of whole datasets once, and finds them again by content.

One file per reference and dataset: folder/<key>.safetensors with `chosen` and `rejected` [pairs]. The key is a hash of
the reference's weights and configuration, the precision it runs in, and the token columns of every pair: whatever
changes the numbers. Neither names of models nor the layout of batches do.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trimtab_common.sharding import whole_tensor
from trimtab_common.stats import gather_over_ranks, world_size
from trimtab_common.tracking import progress
from trimtab_lm.hf.types import Batch, Collate
from trimtab_lm.interface import Data
from trimtab_lm.models.head import write_beside
from trimtab_lm.models.reference import Reference

from .collator import REFERENCE_COLUMNS, SIDES

Columns = tuple[list[float], list[float]]
"""Log-probabilities of the chosen and of the rejected answers, one of each per pair."""

Score = Callable[[Batch], tuple[Tensor, Tensor]]
"""From a batch of pairs to the log-probabilities [B] of their chosen and of their rejected answers."""

FORMAT = 1
INDIFFERENT = {
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "transformers_version",
    "use_cache",
}  # fmt: skip
"""Entries of a model's configuration that leave log-probabilities as they are, or are in the weights (dtype)."""


class ReferenceCache:
    """Log-probabilities under a reference as it was when this object was constructed.

    reference: the policy itself may serve, as long as it has not been trained. folder: where the files lie, made with
    the first. precision: what the forward pass is cast to, such as "bf16"; None or "no" for the weights' own.
    """

    def __init__(self, reference: Reference, folder: Path, *, precision: str | None):
        self.reference, self.folder, self.precision = reference, folder, str(precision)
        self.fingerprint = fingerprint(reference)

    def with_columns(
        self, dataset: Data, score: Score, collate: Collate, *, batch_size: int, rank: int, code: str | None = ""
    ) -> Dataset:
        """A tokenized dataset with the columns `REFERENCE_COLUMNS`, from disk or computed. Collective.

        code: the source of what replaces our methods in `score`, a part of the key; None: it is not known, so that no
            file is read or written.
        score, collate, batch_size, rank: see `score_dataset`. Raises ValueError for a stream, and where the numbers
        are not on disk and the reference has changed since.
        """
        if not isinstance(dataset, Dataset):
            raise ValueError(
                "precompute_ref_log_probs=True needs a data set of which all rows are there; this one is a stream. Set "
                "it to False, or load the data set without streaming."
            )
        file = self.folder / f"{self._key(dataset, code or '')}.safetensors"
        if code is not None and all(gather_over_ranks(file.is_file())):
            try:
                tensors = load_file(file)
            except SafetensorError as error:
                raise ValueError(f"{file} is not readable ({error}). Delete it: it will be computed again.") from error
            columns = tensors["chosen"].tolist(), tensors["rejected"].tolist()
        else:
            if fingerprint(self.reference) != self.fingerprint:
                raise ValueError(
                    f"The reference's log-probabilities of this data set, {len(dataset):,} pairs, are not in "
                    f"{self.folder} and cannot be computed any more: precompute_ref_log_probs=True keeps no copy of "
                    "the reference, and the model has been trained since. Give the data set to the constructor "
                    "(eval_dataset={name: data set}), or pass a ref_model."
                )
            columns = score_dataset(dataset, score, collate, batch_size=batch_size, rank=rank)
            if rank == 0 and code is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                named = zip(SIDES, columns, strict=True)
                write_beside({side: torch.tensor(column, dtype=torch.float64) for side, column in named}, file)
        for name, column in zip(REFERENCE_COLUMNS, columns, strict=True):
            dataset = dataset.add_column(name, column)
        return dataset

    def _key(self, dataset: Dataset, code: str) -> str:
        names = sorted(name for name in dataset.column_names if name.endswith(("_input_ids", "_labels")))
        digest = hashlib.sha256(f"{FORMAT} {self.fingerprint} {self.precision} {names}{code}".encode())
        for row in dataset.with_format(None):
            for name in names:
                ids = np.asarray(row[name], dtype=np.int64)
                digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
        return digest.hexdigest()[:32]


def fingerprint(reference: Reference) -> str:
    """A hash of a reference's configuration and weights. Collective.

    For a PEFT model only the adapter in use counts; with adapters off the hash is the base model's.
    """
    model = reference.model
    adapters = set(model.peft_config) - {reference.adapter} if isinstance(model, PeftModel) else set()
    config = {name: value for name, value in model.config.to_dict().items() if name not in INDIFFERENT}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    named = model.state_dict(keep_vars=True).items()
    weights = {_plain_name(name): weight for name, weight in named if adapters.isdisjoint(name.split("."))}
    for name in sorted(weights):
        tensor = whole_tensor(weights[name])
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _plain_name(name: str) -> str:
    """A weight's name in the model under its adapters."""
    return name.removeprefix("base_model.model.").replace("base_layer.", "").replace("original_module.", "")


@torch.no_grad()
def score_dataset(
    dataset: Dataset,
    score: Score,
    collate: Collate,
    *,
    batch_size: int,
    rank: int,
) -> Columns:
    """Both columns of a tokenized dataset, in its order; the processes share the work. Collective.

    score: from a batch of `collate` to log-probabilities [B], [B]. Pairs of like length go together.
    """
    rows = dataset.with_format(None)
    answers = zip(rows["chosen_labels"], rows["rejected_labels"], strict=True)
    sizes = [len(chosen) + len(rejected) for chosen, rejected in answers]
    order = sorted(range(len(rows)), key=lambda i: sizes[i], reverse=True)
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    processes = world_size()
    found: dict[int, tuple[float, float]] = {}
    # As many batches on every process, for models whose forward pass is itself collective.
    for turn in progress(range(-(-len(batches) // processes)), "reference log-probs"):
        own = batches[(turn * processes + rank) % len(batches)]
        chosen, rejected = score(collate([rows[i] for i in own]))
        found |= dict(zip(own, zip(chosen.tolist(), rejected.tolist(), strict=True), strict=True))
    everything = {i: pair for part in gather_over_ranks(found) for i, pair in part.items()}
    return [everything[i][0] for i in range(len(rows))], [everything[i][1] for i in range(len(rows))]
