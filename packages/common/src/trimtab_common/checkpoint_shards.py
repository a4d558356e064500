"""Tensors divided over processes (DTensor): all processes write them, and any number of processes can read them."""

from __future__ import annotations

import dataclasses
import enum
import io
import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor, empty

from trimtab_common.sealing import CheckpointError

Place: TypeAlias = tuple[str | int, ...]
"""The keys that lead to a tensor in a tree of dicts."""
Owner: TypeAlias = Callable[[Place], Tensor | None]
"""Maps a tensor's place to its parameter: the weight itself, or the weight of an optimizer moment; None if none."""


def split(tree: Mapping[Any, object], place: Place = ()) -> tuple[dict[Any, Any], dict[Place, DTensor]]:
    """Splits a tree of dicts into the rest and the tensors that are divided over processes, by their places."""
    rest: dict[Any, Any] = {}
    shards: dict[Place, DTensor] = {}
    for key, value in tree.items():
        if isinstance(value, DTensor):
            shards[*place, key] = value
        elif isinstance(value, Mapping):
            rest[key], inner = split(value, (*place, key))
            shards |= inner
        else:
            rest[key] = value
    return rest, shards


def join(tree: dict[Any, Any], tensors: Mapping[Place, Tensor]) -> None:
    """Puts tensors at their places in a tree of dicts."""
    for (*way, last), tensor in tensors.items():
        node = tree
        for key in way:
            node = node.setdefault(key, {})
        node[last] = tensor


def write(folder: Path, shards: Mapping[Place, DTensor]) -> None:
    """Writes tensors; each process writes its parts. Collective."""
    dcp.save({json.dumps(place): shard.detach() for place, shard in shards.items()}, checkpoint_id=folder)


def read(folder: Path, owner: Owner) -> dict[Place, Tensor]:
    """Reads what `write` wrote; reads only this process's part of a tensor whose owner is divided. Collective.

    torch unpickles the folder's metadata: `refuse_code` comes first.
    """
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: _empty(facts.size, facts.properties.dtype, owner(tuple(json.loads(name))))
        for name, facts in stored.items()
        if isinstance(facts, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=folder)
    return {tuple(json.loads(name)): tensor for name, tensor in tensors.items()}


def refuse_code(checkpoint: Path) -> None:
    """Raises CheckpointError if the pickle that `torch.distributed.checkpoint` loads contains more than data."""
    for file in checkpoint.rglob(".metadata"):
        try:
            with file.open("rb") as stream:
                metadata = _Metadata(stream).load()
            for place, part in metadata.storage_data.items():
                if isinstance(metadata.state_dict_metadata[place.fqn], BytesStorageMetadata):
                    with (file.parent / part.relative_path).open("rb") as stream:
                        stream.seek(part.offset)
                        torch.load(io.BytesIO(stream.read(part.length)), weights_only=True)
        except (pickle.UnpicklingError, AttributeError, LookupError, RuntimeError, EOFError) as error:
            raise CheckpointError(
                f"{file.parent}: to read it would run code, or it is damaged ({error!r:.200}). Resume from one "
                "that you have saved yourself."
            ) from error


class _Metadata(pickle.Unpickler):
    """Unpickles the metadata of `torch.distributed.checkpoint`, and only its dataclasses."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns the class, if the file cannot run code by making an object of it."""
        if (module, name) in _PARTS:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.2, not 3.11.7, pickles members of enums by it
            return _member
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.startswith("torch.distributed.checkpoint.") and "." not in name:
            kind = super().find_class(module, name)
            if dataclasses.is_dataclass(kind) or isinstance(kind, enum.EnumType):
                return kind
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _member(kind: object, name: str) -> enum.Enum:
    if not isinstance(kind, enum.EnumType):
        raise pickle.UnpicklingError(f"it reads {name!r} of {kind!r:.80}")
    return kind[name]


_PARTS = {("torch", "Size"), ("torch.serialization", "_get_layout"), ("pathlib", type(Path()).__name__)}


def divided(tree: Mapping[Any, object], owner: Owner, place: Place = ()) -> dict[Any, Any]:
    """Divides each whole tensor in a tree of dicts over the processes, in the same way as its owner."""
    parts: dict[Any, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            parts[key] = divided(value, owner, (*place, key))
        elif isinstance(value, Tensor) and not isinstance(value, DTensor):
            parts[key] = _divided(value, owner((*place, key)))
        else:
            parts[key] = value
    return parts


def _divided(tensor: Tensor, owner: Tensor | None) -> Tensor:
    if not isinstance(owner, DTensor) or owner.shape != tensor.shape:
        return tensor
    # Without a source every process cuts its part out of its own copy.
    return distribute_tensor(tensor.to(owner.device), owner.device_mesh, owner.placements, src_data_rank=None)


def _empty(size: torch.Size, dtype: torch.dtype, owner: Tensor | None) -> Tensor:
    if not isinstance(owner, DTensor) or owner.shape != size:
        return torch.empty(size, dtype=dtype)
    return empty(size, dtype=dtype, device_mesh=owner.device_mesh, placements=owner.placements)
