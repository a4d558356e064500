"""What must hold before the first update; each check that fails warns with its cause and cure."""

import warnings

import torch
from torch import Tensor

from trimtab_lm.models.interface import Model

from .config import GRPOConfig


def tolerance(model: Model, args: GRPOConfig) -> float:
    """Nats per token by which two ways to the same log-probability may differ."""
    is_exact = model.dtype in (torch.float32, torch.float64) and not (args.bf16 or args.fp16)
    return 1e-3 if is_exact else 0.5


def check_start(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor | None, *, most: float) -> None:
    """Before any update the policy gives the log-probabilities of the rollout, and those of its reference. All [N]."""
    if not len(logprobs):
        return
    gap = float((logprobs - old_logprobs).detach().abs().max())
    if gap > most:
        warnings.warn(
            f"Before the first update, log-probabilities differ from the rollout's by up to {gap:.3g} nats (at most "
            f"{most:g} is rounding), so that ratios do not start from 1. Is disable_dropout off, does the model apply "
            "dropout by itself, or does it route tokens by their batch (mixture of experts)?",
            stacklevel=4,
        )
    gap = 0.0 if ref_logprobs is None else float((logprobs - ref_logprobs).detach().abs().max())
    if gap > most:
        warnings.warn(
            f"Before the first update, policy and reference differ by up to {gap:.3g} nats per token (at most {most:g} "
            "is rounding). That is right if an adapter was trained before. If not: were the weights changed after the "
            "trainer was constructed, is disable_dropout off, or do the adapters not start from zero (PiSSA)?",
            stacklevel=4,
        )
