"""Models whose weights are divided over processes (FSDP2): whole where code reads them, and prepared for inference."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trimtab_lm.models.interface import Model

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


def reshard(model: nn.Module) -> None:
    """Frees the weights of other processes that a forward pass without gradients left: those of the head, for one."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_tensor(tensor: Tensor) -> Tensor:
    """Returns a weight with the parts of all processes. Collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def full_state_dicts(accelerator: Accelerator) -> Iterator[None]:
    """Lets saves inside the block write full weights, also where checkpoints are sharded."""
    if not accelerator.is_fsdp2:
        yield
        return
    plugin = accelerator.state.fsdp_plugin
    kind = plugin.state_dict_type
    plugin.set_state_dict_type("FULL_STATE_DICT")
    try:
        yield
    finally:
        plugin.set_state_dict_type(kind.name)


def prepare_sharding(model: Model, accelerator: Accelerator) -> None:
    """Checks that the accelerator can shard the model, if it is to, and keeps the precision of what the model returns.

    Raises:
        ValueError: other modules than the input embeddings and the LM head share a weight, as those of T5 and BART.
    """
    if not accelerator.is_fsdp2:
        return
    together = (model.get_input_embeddings(), model.get_output_embeddings())  # one group of accelerate's
    holders: dict[nn.Parameter, list[tuple[str, nn.Module]]] = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders[parameter].append((name, module))
    for modules in holders.values():
        if len(modules) > 1 and any(module not in together for _, module in modules):
            names = ", ".join(name for name, _ in modules)
            raise ValueError(
                f"FSDP2 cannot shard {type(model).__name__}: {names} share one weight, and accelerate puts only the "
                "input embeddings and the LM head into one group. Train it with DDP or DeepSpeed."
            )
    keep_output_precision(accelerator)


def keep_output_precision(accelerator: Accelerator) -> None:
    """Lets models that the accelerator shards afterwards return float32 in mixed precision.

    accelerate casts outputs to the computation's dtype, and bfloat16 rounds log-probabilities to two digits.
    """
    if accelerator.is_fsdp2 and (policy := accelerator.state.fsdp_plugin.mixed_precision_policy) is not None:
        accelerator.state.fsdp_plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None)


def prepared_for_inference(model: Module, accelerator: Accelerator) -> Module:
    """Puts a model that is not trained where it runs: on the accelerator's device, or sharded over the processes.

    Args:
        model: a reference or reward model.
        accelerator: that prepares the policy.
    """
    if accelerator.is_fsdp2:
        sharded = fsdp2_prepare_model(accelerator, model)
        sharded.set_reshard_after_forward(True, recurse=False)  # else the outermost part stays whole after a call
        return sharded
    return placed(model, accelerator.device)


def placed(model: Module, device: torch.device | str) -> Module:
    """Returns the model on a device; quantized, dispatched and sharded ones stay where they are."""
    is_fixed = getattr(model, "quantization_method", None) or getattr(model, "hf_device_map", None)
    return model if is_fixed or isinstance(model, FSDPModule) else model.to(device)
