"""What models of transformers say of themselves, and tensor subclasses, read on transformers 5.24 and torch 2.13."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_map as tree_map

plain_tensors = torch._C.DisableTorchFunctionSubclass
"""In its block torch treats tensors of a subclass as plain ones."""


def attention_of(model: Any) -> str:
    """The attention that a model computes with: "sdpa", "eager", "flex_attention" or a kernel's name.

    A release without the name raises AttributeError.
    """
    return str(model.config._attn_implementation)


def undivided(model: Any) -> Iterable[str] | None:
    """The classes of a model's modules that engines shard as units: its blocks. None where the model names none.

    A release without the name raises AttributeError.
    """
    names: Iterable[str] | None = model._no_split_modules
    return names
