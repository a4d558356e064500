"""Adapted linear layers as one operation: PEFT's needs eight, which read and write the layer's outputs four times."""

from collections.abc import Callable
from typing import Any, cast

import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

Collect = Callable[[Tensor, Tensor], None]
"""Takes the gradients of a call's matrices A [b, r, n] and B [b, m, r], one for each of its b rows."""


def fuse_adapters(denoiser: nn.Module) -> None:
    """Lets the adapted linear layers of a denoiser compute as `FusedLoraLinear`."""
    for module in denoiser.modules():
        if type(module) is lora.Linear:
            module.__class__ = FusedLoraLinear


class FusedLoraLinear(lora.Linear):
    """PEFT's layer, whose output x W^T + c + s (x A^T) B^T is one operation where it can be.

    It can be with one active adapter of the plain kind on a frozen `nn.Linear`. PEFT computes everything else: several
    adapters, DoRA, dropout in training, merged or quantized weights, and layers whose parts have hooks.

    Attributes:
        collect: gets the gradients of A and B by row, which their `.grad` then lacks; None: `.grad` gets their sum.
    """

    collect: Collect | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's output: [b, ..., m] for x [b, ..., n]."""
        adapter, device = self.fused_adapter, x.device.type
        if adapter is None or args or kwargs:
            return super().forward(x, *args, **kwargs)
        base, (first, second) = cast(nn.Linear, self.base_layer), self.matrices(adapter)
        operands: tuple[Tensor | None, ...] = (x, base.weight, base.bias, first, second)
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            operands = tuple(None if each is None else each.to(dtype) for each in operands)
        elif not x.dtype == base.weight.dtype == first.dtype:
            return super().forward(x)
        return _AdaptedLinear.apply(*operands, self.scaling[adapter], self.collect)

    @property
    def fused_adapter(self) -> str | None:
        """The adapter with which the layer is one operation; None: PEFT computes it."""
        active = [name for name in self.active_adapters if name in self.lora_A]
        if len(active) != 1 or self.disable_adapters or self.merged or self.fan_in_fan_out:
            return None
        name, base = active[0], cast(nn.Linear, self.base_layer)
        parts: list[Any] = [self.lora_A[name], self.lora_B[name], self.lora_dropout[name]]
        first, second, dropout = parts
        if not all(_is_plain(part) for part in (base, first, second)) or hasattr(base, "_hf_hook"):
            return None
        if base.weight.requires_grad or first.bias is not None or second.bias is not None:
            return None
        has_dropout = dropout.training and not isinstance(dropout, nn.Identity)
        return None if has_dropout or name in self.lora_variant else name

    def matrices(self, adapter: str) -> tuple[nn.Parameter, nn.Parameter]:
        """An adapter's A [r, n] and B [m, r]."""
        parts: list[Any] = [self.lora_A[adapter], self.lora_B[adapter]]
        return parts[0].weight, parts[1].weight


def _is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear and not module._forward_hooks and not module._forward_pre_hooks


class _AdaptedLinear(torch.autograd.Function):
    """x W^T + c + s (x A^T) B^T, with gradients for x, A and B."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        first: Tensor,
        second: Tensor,
        scaling: float,
        collect: Collect | None,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        inner = rows @ first.t()
        output = linear(rows, weight, bias).addmm_(inner, second.t(), alpha=scaling)
        ctx.save_for_backward(rows, inner, weight, first, second)
        ctx.shape, ctx.scaling, ctx.collect = x.shape, scaling, collect
        return output.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, inner, weight, first, second = ctx.saved_tensors
        outer = gradient.reshape(-1, gradient.shape[-1])
        of_inner = (outer @ second).mul_(ctx.scaling)
        of_x = (outer @ weight).addmm_(of_inner, first).view(ctx.shape) if ctx.needs_input_grad[0] else None
        if ctx.collect is None:
            of_first, of_second = of_inner.t() @ rows, (outer.t() @ inner).mul_(ctx.scaling)
            return of_x, None, None, of_first, of_second, None, None
        each = (ctx.shape[0], -1)
        of_first = torch.bmm(of_inner.unflatten(0, each).transpose(1, 2), rows.unflatten(0, each))
        of_second = torch.bmm(outer.unflatten(0, each).transpose(1, 2), inner.unflatten(0, each)).mul_(ctx.scaling)
        ctx.collect(of_first, of_second)
        return of_x, None, None, None, None, None, None
