"""The accelerator of a run: accelerate's, with the same weighing of losses under every engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import groupby
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, ProjectConfiguration
from torch import Tensor, nn

from trimtab_common.health import TrainingDivergedError
from trimtab_common.sharding import whole_tensor
from trimtab_common.stats import Mean


class WeighingAccelerator(Accelerator):
    """An accelerator whose `backward` weighs the loss in the same way under every engine.

    accelerate divides a loss by `gradient_accumulation_steps`. Under DeepSpeed it does not: that engine reads the
    number once, when it starts.

    Attributes:
        loss_divisor: what `backward` divides a loss by.
    """

    loss_divisor = 1.0

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Adds the gradient of `loss / loss_divisor`; see accelerate."""
        super().backward(loss / self.loss_divisor, **kwargs)

    @contextmanager
    def part_of_step(self, model: nn.Module, *, is_last: bool, share: float = 1.0) -> Iterator[None]:
        """Inside the block `backward` belongs to an optimizer step of several parts, for every engine.

        Processes exchange gradients with the last part alone. FSDP exchanges them with each, because a process has room
        for its shard of the gradient only.

        Args:
            model: as it was prepared.
            is_last: whether the step is due after this part. DeepSpeed then takes it in `backward`.
            share: what a loss is multiplied by.
        """
        self.loss_divisor, self.sync_gradients = 1 / share, is_last
        exchanges = is_last or self.distributed_type == DistributedType.FSDP
        try:
            with nullcontext() if exchanges else self.no_sync(model):
                yield
        finally:
            self.loss_divisor, self.sync_gradients = 1.0, True

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> Tensor:
        """As accelerate's; the norm is a tensor under every engine, and whole where the weights are divided."""
        return whole_tensor(torch.as_tensor(super().clip_grad_norm_(*args, **kwargs), device=self.device))

    def norm_stats(self, norm: Tensor) -> dict[str, Mean]:
        """The statistics of an update: `grad_norm`, and in fp16 `policy/overflowed`, the share that is skipped.

        A loss scale that is too large makes the gradient infinite. `optimizer.step` then makes no update and lowers the
        scale, as usual at the start of a run in fp16: that norm is no number to log.

        Args:
            norm: the gradient's norm, before it is clipped, after it was divided by the loss scale.

        Raises:
            TrainingDivergedError: the update is skipped, and the scale is below 1: a smaller one would not help.
        """
        if self.scaler is None:
            return {"grad_norm": Mean(norm, 1.0)}
        is_skipped = not bool(torch.isfinite(norm))
        if is_skipped and (scale := self.scaler.get_scale()) < 1:
            raise TrainingDivergedError(
                f"The gradient is not finite in fp16, and the updates that were skipped for it have lowered the loss "
                f"scale to {scale:.3g}: nothing trains. Train in bf16 or float32, or resume from the last checkpoint "
                "with a lower learning rate."
            )
        stats = {"policy/overflowed": Mean(float(is_skipped), 1.0)}
        return stats if is_skipped else stats | {"grad_norm": Mean(norm, 1.0)}


def create_accelerator(
    accelerator_kwargs: Mapping[str, Any],
    project_kwargs: Mapping[str, Any],
    *,
    mixed_precision: str | None = None,
) -> WeighingAccelerator:
    """Returns the accelerator of a run, on the CPU if there is no GPU.

    Args:
        accelerator_kwargs: arguments of `accelerate.Accelerator`; they take precedence.
        project_kwargs: arguments of `accelerate.utils.ProjectConfiguration`.
        mixed_precision: "no", "fp16" or "bf16"; None leaves it to the launcher.

    Raises:
        ValueError: the launcher or the arguments ask for version 1 of FSDP.
    """
    defaults = {
        # Without cpu=True, torchrun on a machine without a GPU gives processes that never synchronise.
        "cpu": not torch.accelerator.is_available(),
        "mixed_precision": mixed_precision,
        "project_config": ProjectConfiguration(**project_kwargs),
    }
    accelerator = WeighingAccelerator(**{**defaults, **accelerator_kwargs})
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError(
            "This run is configured for version 1 of FSDP; version 2 is supported. Set fsdp_version: 2 in accelerate's "
            "configuration, or FullyShardedDataParallelPlugin(fsdp_version=2)."
        )
    return accelerator


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors on a device: in one copy, if those from elsewhere are on one other device."""
    rest = [(i, tensor.detach()) for i, tensor in enumerate(tensors) if tensor.device != device]
    if not rest:
        return list(tensors)
    if len({tensor.device for _, tensor in rest}) > 1:
        return [tensor.to(device) for tensor in tensors]
    rest.sort(key=lambda pair: (-pair[1].itemsize, str(pair[1].dtype)))  # each begins at a multiple of its size
    kinds = [
        torch.cat([tensor.flatten() for _, tensor in kind]) for _, kind in groupby(rest, lambda pair: pair[1].dtype)
    ]
    flat = torch.cat([kind.view(torch.uint8) for kind in kinds]).to(device)
    there = list(tensors)
    for (i, tensor), part in zip(rest, flat.split([tensor.nbytes for _, tensor in rest]), strict=True):
        there[i] = part.view(tensor.dtype).view(tensor.shape)
    return there


def multiplies_in_float32(device: torch.device) -> bool:
    """Whether a device multiplies float32 matrices as they are, and not in TF32 or bfloat16.

    `torch.get_float32_matmul_precision()` fails where a program has set the precision for each backend, as transformers
    does before it compiles a model.
    """
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision in ("none", "ieee")


@cache
def memory_of(device: torch.device) -> int:
    """The bytes of an accelerator's memory; 0 for a CPU, and where PyTorch does not know them."""
    if device.type in ("cpu", "meta"):
        return 0
    try:
        return torch.accelerator.get_memory_info(device)[1]
    except RuntimeError:
        return 0


def fused_if_possible(parameters: Iterable[nn.Parameter]) -> bool | None:
    """Returns the argument `fused` of torch's Adam and AdamW: whether the device has a fused kernel.

    On a CPU it takes a seventh of the time of the other implementations.

    Returns:
        True, or None, which lets torch choose.
    """
    return {parameter.device.type for parameter in parameters} <= {"cpu", "cuda"} or None
