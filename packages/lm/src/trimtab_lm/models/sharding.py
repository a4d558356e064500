"""Models whose weights several processes share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.fsdp import FSDPModule

AnyModule = TypeVar("AnyModule", bound=nn.Module)


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Every process holds all weights inside the block. Collective.

    Args:
        model: the module that FSDP was applied to as a whole; any other module is left as it is.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    model._get_fsdp_state()._lazy_init()  # else the first part that is called would count as the whole
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = {
        group: group.post_forward_mesh_info for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups
    }
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
        for group, mesh in groups.items():
            group.post_forward_mesh_info = mesh


def prepare_frozen(model: AnyModule, accelerator: Accelerator) -> AnyModule:
    """Puts a model that does not train on the accelerator's device, and shards it where the accelerator does."""
    if accelerator.is_fsdp2:
        return fsdp2_prepare_model(accelerator, model)
    accelerator.prepare_model(model, evaluation_mode=True)
    return model
