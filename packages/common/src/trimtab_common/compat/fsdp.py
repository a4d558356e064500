"""FSDP2's states and hooks of modules, read on torch 2.13. Another release without a name raises AttributeError."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

Hooks = OrderedDict[int, Callable[..., Any]]


@contextmanager
def unsharded(shards: Sequence[FSDPModule]) -> Iterator[None]:
    """Gathers the weights of sharded modules, and keeps them whole after forward passes until the block ends.

    Args:
        shards: a model's sharded modules, at least one, the outermost first.
    """
    shards[0]._get_fsdp_state()._lazy_init()  # the first forward pass of the outermost module does it otherwise
    states = dict.fromkeys(module._get_fsdp_state() for module in shards)
    groups = [group for state in states for group in state._fsdp_param_groups if not group.is_unsharded]
    after_forward = [group.post_forward_mesh_info for group in groups]
    for group in groups:
        group.post_forward_mesh_info = None  # keeps the weights after a forward pass
        group.unshard()
        group.wait_for_unshard()
    try:
        yield
    finally:
        for group, mesh in zip(groups, after_forward, strict=True):
            group.post_forward_mesh_info = mesh
            group.reshard()


def set_precision(module: FSDPModule, policy: MixedPrecisionPolicy) -> None:
    """Gives one sharded module a precision that differs from its model's."""
    state = module._get_fsdp_state()
    state._mp_policy = policy
    for group in state._fsdp_param_groups:
        group.mp_policy = policy


def forward_hooks(module: nn.Module) -> tuple[Hooks, Hooks]:
    """The hooks before and after a module's forward pass, which may be changed in place."""
    return module._forward_pre_hooks, module._forward_hooks  # type: ignore[return-value]
