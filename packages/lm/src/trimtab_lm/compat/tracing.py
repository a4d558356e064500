"""The memory that operators would take, counted without it on torch 2.13 and transformers 5.24."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

aten = torch.ops.aten


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of what operators return, as long as it lives; `peak` is the most at one time.

    The tensors may be without memory, under `without_memory` or made there. Checks of their values pass: all elements
    are true, none is, and a number that the program reads is finite, almost 0, and not 0.

    Args:
        known: tensors that are not counted.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.peak, self.live, self.known = 0, 0, {tensor.untyped_storage()._cdata for tensor in known}

    def __enter__(self) -> Self:
        self.casts = Library("aten", "IMPL", "AutocastCPU")
        for name in ("layer_norm", "group_norm"):
            self.casts.impl(name, _in_float32(getattr(torch, name)))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.casts._destroy()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1e-6 if args[0].is_floating_point() else 0
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (aten.all, aten.any) and isinstance(result, FakeTensor):
            return torch.full(result.shape, func.overloadpacket is aten.all)
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


def _in_float32(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The operator as a GPU's autocast runs it."""

    def run(*args: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return operator(*(arg.float() if isinstance(arg, Tensor) else arg for arg in args))

    return run


def without_memory() -> AbstractContextManager[object]:
    """A block in which operators return tensors without memory, which remain so after it."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def peak_bytes(model: PreTrainedModel, step: Callable[[], object]) -> int:
    """Returns the most bytes that a step would hold at one time, beside the model's weights and their gradients.

    Args:
        model: on torch's meta device.
        step: runs the model forward and backward, on tensors of the CPU that it creates.
    """
    with without_memory():
        model._apply(lambda weight: torch.empty(weight.shape, dtype=weight.dtype))
        model.tie_weights()
        for weight in model.parameters():
            if weight.requires_grad:  # a gradient is added to one that exists
                weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
        with LiveBytes(model.parameters()) as live:
            step()
    return live.peak
