"""Tensors that are divided over processes (DTensor): written by all of them, read onto any number of processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor, empty

Place: TypeAlias = tuple[str | int, ...]
"""The keys that lead to a tensor in a tree of dicts."""
Owner: TypeAlias = Callable[[Place], Tensor | None]
"""From a tensor's place to the parameter that it belongs to: the weight itself, or that of a moment. None: to none."""


def split(tree: Mapping[Any, object], place: Place = ()) -> tuple[dict[Any, Any], dict[Place, DTensor]]:
    """A tree of dicts without the tensors that are divided over processes, and those by their place in it."""
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
    """Reads what `write` wrote: of a tensor whose owner is divided over processes, this process's part. Collective.

    torch unpickles the folder's metadata, so its origin must be known: a checkpoint's seal shows changes.
    """
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: _empty(facts.size, facts.properties.dtype, owner(tuple(json.loads(name))))
        for name, facts in stored.items()
        if isinstance(facts, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=folder)
    return {tuple(json.loads(name)): tensor for name, tensor in tensors.items()}


def divided(tree: Mapping[Any, object], owner: Owner, place: Place = ()) -> dict[Any, Any]:
    """A tree of dicts in which every whole tensor is divided over processes as its owner is."""
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
