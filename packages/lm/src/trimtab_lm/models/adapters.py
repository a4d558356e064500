"""A PEFT model with another of its adapters, or with none, for the length of a block."""

from collections.abc import Iterator
from contextlib import contextmanager

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper


@contextmanager
def adapter_on(model: PeftModel, name: str) -> Iterator[None]:
    """Run a PEFT model with another of its adapters inside the block; what trains is as before afterwards."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    before = model.active_adapter
    try:
        model.set_adapter(name)
        yield
    finally:
        model.set_adapter(before)
        for parameter, flag in flags:
            parameter.requires_grad = flag


@contextmanager
def adapters_off(model: PeftModel) -> Iterator[None]:
    """Run a PEFT model as its base model inside the block, `modules_to_save` included; blocks may nest.

    Afterwards each layer's adapter is on or off as before, and each parameter requires gradients as before (PEFT by
    itself switches all of them on).
    """
    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    already_off = [layer for layer in layers if layer.disable_adapters]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with model.disable_adapter():
            yield
    finally:
        for layer in already_off:
            layer.enable_adapters(False)
        for parameter, flag in flags:
            parameter.requires_grad = flag
