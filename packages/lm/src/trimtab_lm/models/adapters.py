"""Blocks in which a PEFT model runs with another of its adapters, or with none."""

from collections.abc import Iterator
from contextlib import contextmanager

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn


@contextmanager
def adapter_on(model: PeftModel, name: str) -> Iterator[None]:
    """Activates another adapter of a PEFT model inside the block.

    Afterwards the adapters that were active before are active again, and each parameter requires gradients as before.

    Args:
        model: has an adapter of that name.
        name: the adapter to activate.
    """
    before = model.active_adapter
    with requires_grad_kept(model):
        try:
            model.set_adapter(name)
            yield
        finally:
            model.set_adapter(before)


@contextmanager
def adapters_off(model: PeftModel) -> Iterator[None]:
    """Switches the adapters of a PEFT model off inside the block, `modules_to_save` included; blocks may nest.

    Afterwards each layer's adapter is on or off as before, and each parameter requires gradients as before. PEFT alone
    would switch all of them on.
    """
    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    already_off = [layer for layer in layers if layer.disable_adapters]
    with requires_grad_kept(model):
        try:
            with model.disable_adapter():
                yield
        finally:
            for layer in already_off:
                layer.enable_adapters(False)


@contextmanager
def requires_grad_kept(model: nn.Module) -> Iterator[None]:
    """Makes each parameter require gradients after the block as before, whatever the block does."""
    before = dict(model.named_parameters())
    flags = {name: parameter.requires_grad for name, parameter in before.items()}
    try:
        yield
    finally:
        # FSDP registers the whole parameters in the place of the shards during a forward pass, and may leave them.
        for parameters in (before, dict(model.named_parameters())):
            for name, parameter in parameters.items():
                parameter.requires_grad = flags[name]
