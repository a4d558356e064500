"""Models whose weights are divided over processes (FSDP2): whole inside a block, or prepared for inference alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.fsdp import FSDPModule

Module = TypeVar("Module", bound=nn.Module)


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """Gathers all weights of a model once, on every process, until the end of the block. Collective.

    For code that reads weights, and for generation: forward passes inside the block need no communication, so processes
    may run different numbers of them. Blocks may nest. Changes of weights inside the block are lost. A model that is
    not sharded stays as it is.

    Args:
        model: the module that was sharded, which holds all others.
    """
    shards = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if shards:
        shards[0]._get_fsdp_state()._lazy_init()  # of the outermost module, which its first forward pass does otherwise
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


def prepared_for_inference(model: Module, accelerator: Accelerator) -> Module:
    """Puts a model that is not trained where it runs: on the accelerator's device, or sharded over the processes.

    Args:
        model: a reference or reward model.
        accelerator: that prepares the policy.
    """
    if accelerator.is_fsdp2:
        return fsdp2_prepare_model(accelerator, model)
    return placed(model, accelerator.device)


def placed(model: Module, device: torch.device | str) -> Module:
    """Returns the model on a device; quantized, dispatched and sharded ones stay where they are."""
    is_fixed = getattr(model, "quantization_method", None) or getattr(model, "hf_device_map", None)
    return model if is_fixed or isinstance(model, FSDPModule) else model.to(device)
