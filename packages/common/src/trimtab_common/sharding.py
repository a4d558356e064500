"""Models with weights divided over processes (FSDP2, ZeRO-3): gathers weights, and prepares models for inference."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trimtab_common.compat.fsdp import forward_hooks, unsharded

Module = TypeVar("Module", bound=nn.Module)


def whole_weights(model: nn.Module) -> AbstractContextManager[None]:
    """Gathers all weights of a model once, on every process, until the end of the block. Collective.

    For code that reads weights, and for generation: forward passes inside the block need no communication, so processes
    may run different numbers of them. Blocks may nest. Changes to weights inside the block are lost. Does nothing to a
    model that is not sharded.

    Args:
        model: the module that was sharded, which holds all others.
    """
    if any(is_divided_by_deepspeed(parameter) for parameter in model.parameters()):
        return _whole_weights_of_deepspeed(model)
    shards = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return unsharded(shards) if shards else nullcontext()


@contextmanager
def _whole_weights_of_deepspeed(model: nn.Module) -> Iterator[None]:
    """The same for ZeRO-3, whose hooks would divide the weights again after each forward pass."""
    import deepspeed

    divided = [weight for weight in model.parameters() if is_divided_by_deepspeed(weight)]
    missing = [weight for weight in divided if weight.ds_status.name == "NOT_AVAILABLE"]  # type: ignore[attr-defined]
    hooks = [hooks for module in model.modules() for hooks in forward_hooks(module)]
    with deepspeed.zero.GatheredParameters(missing, enabled=bool(missing)):
        before = [dict(one) for one in hooks]
        for one in hooks:
            for key in [key for key, hook in one.items() if hook.__module__.startswith("deepspeed.")]:
                del one[key]
        try:
            yield
        finally:
            for one, earlier in zip(hooks, before, strict=True):
                ordered = earlier | one  # with those that transformers adds in the block, at the end
                one.clear()
                one.update(ordered)


def is_divided_by_deepspeed(weight: Tensor) -> bool:
    """Whether DeepSpeed's ZeRO-3 has divided a weight over the processes."""
    return hasattr(weight, "ds_status")


def reshard(model: nn.Module) -> None:
    """Frees gathered weights, such as the head's, that a forward pass without gradients keeps."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_tensor(tensor: Tensor) -> Tensor:
    """Returns a weight with the parts of all processes, without gradient. Collective if it is sharded."""
    if is_divided_by_deepspeed(tensor):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def divides_weights(accelerator: Accelerator) -> bool:
    """Whether each process may hold only a part of the weights, so that reading a model needs all processes."""
    return accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)


@contextmanager
def full_state_dicts(accelerator: Accelerator) -> Iterator[None]:
    """Makes saves inside the block write full weights, even with sharded checkpoints."""
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


def keep_output_precision(accelerator: Accelerator) -> None:
    """Lets models that the accelerator shards afterwards return float32 in mixed precision.

    accelerate casts outputs to the computation's dtype, and bfloat16 rounds log-probabilities to two digits.
    """
    if accelerator.is_fsdp2 and (policy := accelerator.state.fsdp_plugin.mixed_precision_policy) is not None:
        accelerator.state.fsdp_plugin.mixed_precision_policy = dataclasses.replace(policy, output_dtype=None)


def tell_deepspeed_of_batches(accelerator: Accelerator, *, size: int, max_grad_norm: float | None) -> None:
    """Fills in the settings that DeepSpeed needs to prepare a model for a loop that weighs its own losses.

    Args:
        accelerator: that prepares the policy; nothing happens under other engines.
        size: rows of a backward pass on this process.
        max_grad_norm: to which DeepSpeed clips gradients; None: it does not.
    """
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        accelerator.deepspeed_plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": size,
            "train_batch_size": size * accelerator.num_processes,
            "gradient_accumulation_steps": 1,  # by which it would divide losses
            "gradient_clipping": max_grad_norm or 0.0,
        }


def prepared_for_inference(model: Module, accelerator: Accelerator) -> Module:
    """Places a model that is not trained: on the accelerator's device, or sharded over the processes."""
    if accelerator.is_fsdp2:
        sharded = fsdp2_prepare_model(accelerator, model)
        sharded.set_reshard_after_forward(True, recurse=False)  # else the outermost part stays whole after a call
        return sharded
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return _prepared_by_deepspeed(model, accelerator.deepspeed_plugin.deepspeed_config)
    return placed(model, accelerator.device)


def on_one_device(model: Module, device: torch.device | str) -> Module:
    """Moves a model to a device if its tensors are on several devices, so that it can run before it is prepared.

    A reference that shares layers with a policy is divided in this way once the policy has moved.
    """
    devices = {tensor.device for tensor in chain(model.parameters(), model.buffers())}
    return placed(model, device) if len(devices) > 1 else model


def _prepared_by_deepspeed(model: Module, training: Mapping[str, Any]) -> Module:
    """Returns the model in the training precision; divided under ZeRO-3, whole on each process under other stages."""
    import deepspeed

    zero = {name: value for name, value in training["zero_optimization"].items() if value != "auto"}
    stage = zero["stage"] if zero["stage"] == 3 else 0  # the others divide gradients and optimizer states only
    precision = {name: training[name] for name in ("bf16", "fp16") if name in training}
    sizes = {"train_micro_batch_size_per_gpu": 1}  # which DeepSpeed asks for
    deepspeed.initialize(model=model, config={**sizes, **precision, "zero_optimization": {**zero, "stage": stage}})
    return model


def placed(model: Module, device: torch.device | str) -> Module:
    """Moves a model to a device, unless it is quantized, dispatched or sharded."""
    is_fixed = getattr(model, "quantization_method", None) or getattr(model, "hf_device_map", None)
    is_divided = isinstance(model, FSDPModule) or any(map(is_divided_by_deepspeed, model.parameters()))
    return model if is_fixed or is_divided else model.to(device)
