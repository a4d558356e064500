"""One optimizer step: the minibatches that make it up, and whether it is taken."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from trimtab_common.health import TrainingDivergedError
from trimtab_common.stats import Mean, sum_over_ranks

from .config import PPOConfig


@dataclass
class UpdateWindow:
    """The minibatches of one optimizer step: what weighs them, and what decides whether the step is taken."""

    tokens: float  # over the whole window, in all processes
    minibatches: int = 1
    seen: int = 0
    kept: int = 0
    divergence: Mean = Mean(0.0, 0.0)
    is_stopped: bool | None = None  # None until it is decided

    @property
    def is_last(self) -> bool:
        return self.seen == self.minibatches


def count(mask: Tensor) -> float:
    """Positions that count, over all processes. Collective."""
    return float(sum_over_ranks(mask.sum()))


def decide(window: UpdateWindow, config: PPOConfig, device: torch.device) -> float:
    """Decide whether the policy has moved too far to go on; returns the minibatches that all processes keep.

    Collective.
    """
    counts = torch.tensor([window.kept, float(window.divergence.total), float(window.divergence.weight)])
    kept, total, weight = sum_over_ranks(counts.to(device)).tolist()
    window.is_stopped = config.early_stopping and total / weight > 1.5 * config.target_kl
    return kept


@contextmanager
def accumulation(accelerator: Accelerator, minibatches: int) -> Iterator[None]:
    """Inside the block accelerate divides each loss by the number of minibatches; steps wait for `sync_gradients`."""
    before = accelerator.gradient_accumulation_steps
    accelerator.gradient_accumulation_steps = minibatches
    try:
        yield
    finally:
        accelerator.gradient_accumulation_steps = before
        accelerator.sync_gradients = True


def take_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: PPOConfig,
    window: UpdateWindow,
) -> dict[str, Mean]:
    """The optimizer step of a window, unless all of it was skipped or the policy has moved too far already. Collective.

    Raises TrainingDivergedError, with the weights untouched, if the gradient is not finite.
    """
    kept = decide(window, config, accelerator.device)
    if window.is_stopped or not kept:
        optimizer.zero_grad()
        return {"policy/early_stopped": Mean(float(bool(window.is_stopped)), 1.0)}
    norm = accelerator.clip_grad_norm_(model.parameters(), config.max_grad_norm or float("inf"))
    if accelerator.scaler is None and not torch.isfinite(norm):
        optimizer.zero_grad()
        raise TrainingDivergedError(
            f"The gradient has norm {float(norm)}. No update was made. Lower learning_rate ({config.learning_rate}) or "
            "train in bfloat16 or float32."
        )
    optimizer.step()
    optimizer.zero_grad()
    return {"policy/early_stopped": Mean(0.0, 1.0), "grad_norm": Mean(norm, 1.0)}
