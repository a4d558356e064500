"""What models of transformers say of themselves, and tensor subclasses, read on transformers 5.24 and torch 2.13."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map as tree_map
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

UNMASKED = "unmasked"
"""The name of SDPA for which transformers makes no mask; without one it is causal."""
AttentionInterface.register(UNMASKED, ALL_ATTENTION_FUNCTIONS["sdpa"])

plain_tensors = torch._C.DisableTorchFunctionSubclass
"""In its block torch treats tensors of a subclass as plain ones."""


def attention_of(model: Any) -> str:
    """The attention that a model computes with: "sdpa", "eager", "flex_attention" or a kernel's name.

    A release without the name raises AttributeError.
    """
    return str(model.config._attn_implementation)


@contextmanager
def unmasked(config: Any) -> Iterator[None]:
    """Inside the block the SDPA of a model with this configuration is causal over whole rows.

    transformers would first look for documents in the rows, and so wait for an accelerator in each forward pass.
    """
    config._attn_implementation = UNMASKED
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


def undivided(model: Any) -> Iterable[str] | None:
    """The classes of a model's modules that engines shard as units: its blocks. None where the model names none.

    A release without the name raises AttributeError.
    """
    names: Iterable[str] | None = model._no_split_modules
    return names
