"""Context managers that run a PEFT model with another adapter, or without adapters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn


@contextmanager
def adapter_on(model: PeftModel, name: str) -> Iterator[None]:
    """Activates another adapter of a PEFT model inside the block.

    Afterwards the adapters that were active before are active again. Each parameter requires gradients as before,
    inside the block too.
    """
    before, restore_flags = model.active_adapter, requires_grad_keeper(model)
    try:
        model.set_adapter(name)
        restore_flags()
        yield
    finally:
        model.set_adapter(before)
        restore_flags()


@contextmanager
def adapters_off(model: PeftModel) -> Iterator[None]:
    """Switches the adapters of a PEFT model off inside the block, `modules_to_save` included; blocks may nest.

    Afterwards each layer's adapter is on or off as before. PEFT alone would switch all of them on. Each parameter
    requires gradients as before, inside the block too.
    """
    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    already_off = [layer for layer in layers if layer.disable_adapters]
    restore_flags = requires_grad_keeper(model)
    try:
        with model.disable_adapter():
            restore_flags()
            yield
    finally:
        for layer in already_off:
            layer.enable_adapters(False)
        restore_flags()


def requires_grad_keeper(model: nn.Module) -> Callable[[], None]:
    """Returns a function that restores each parameter's present `requires_grad`.

    PEFT changes these flags when it switches adapters. FSDP reads them in the first forward pass, which may be one of
    the reference, to learn which gradients it will reduce.
    """
    before = dict(model.named_parameters())
    flags = {name: parameter.requires_grad for name, parameter in before.items()}

    def restore() -> None:
        # During a forward pass FSDP registers whole parameters instead of shards, and may leave them registered.
        for parameters in (before, dict(model.named_parameters())):
            for name, parameter in parameters.items():
                parameter.requires_grad = flags[name]

    return restore
