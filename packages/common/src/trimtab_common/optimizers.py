"""What torch's optimizers can do on the devices at hand."""

from collections.abc import Iterable

from torch import nn


def fused_if_possible(parameters: Iterable[nn.Parameter]) -> bool | None:
    """The argument `fused` of torch's Adam and AdamW: one kernel for all numbers of a weight, where there is one.

    On a CPU it takes a seventh of the time of the other implementations.

    Args:
        parameters: those that the optimizer will have.

    Returns:
        True, or None, which lets torch choose.
    """
    return {parameter.device.type for parameter in parameters} <= {"cpu", "cuda"} or None
