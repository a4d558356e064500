"""The memory that operators would take, counted without it on torch 2.13 and transformers 5.24."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

UNMASKED = "unmasked"
"""The name of SDPA for which transformers makes no mask; without one it is causal."""
AttentionInterface.register(UNMASKED, ALL_ATTENTION_FUNCTIONS["sdpa"])


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of what operators return, as long as it lives; `peak` is the most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self.live, self.known = 0, 0, set[int]()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage())._cdata not in self.known:
                self.known.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _free(self, key: int, size: int) -> None:
        self.known.remove(key)
        self.live -= size


def peak_bytes(model: PreTrainedModel, step: Callable[[], object]) -> int:
    """Returns the most bytes that a step would hold at one time, beside the model's weights and their gradients.

    Args:
        model: on torch's meta device.
        step: runs the model forward and backward, on tensors of the CPU that it creates.
    """
    with FakeTensorMode():
        model._apply(lambda weight: torch.empty(weight.shape, dtype=weight.dtype))
        model.tie_weights()
        for weight in model.parameters():
            if weight.requires_grad:  # a gradient is added to one that exists
                weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
        with _LiveBytes() as live:
            live.known.update(weight.untyped_storage()._cdata for weight in model.parameters())
            step()
    return live.peak
