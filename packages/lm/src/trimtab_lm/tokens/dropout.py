"""Forward passes without dropout, in which gradient checkpointing still runs."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from transformers import PreTrainedConfig


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Switches dropout off inside the block, in training passes too, and restores every module afterwards.

    transformers runs gradient checkpointing only in training mode, so `model.eval()` alone would switch it off. Where
    gradients are enabled, the modules that checkpoint therefore stay in training mode, with their dropout rates at 0.
    """
    modes = [(module, module.training) for module in model.modules()]
    checkpointing = []
    if torch.is_grad_enabled():  # only transformers' layers have the attribute
        checkpointing = [module for module, _ in modes if getattr(module, "gradient_checkpointing", False)]
    model.eval()
    try:
        with dropout_rates_at_zero(model) if checkpointing else nullcontext():
            for module in checkpointing:
                module.training = True
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def dropout_rates_at_zero(model: nn.Module) -> Iterator[None]:
    """Sets dropout rates to 0 inside the block, keeps modules in training mode, and restores the rates.

    For blocks that hold the backward pass too. `without_dropout` would not do: `Trainer.training_step` sets the mode of
    the modules itself. Rates that modules read from their config (as Falcon's do) are among those that are set to 0.
    """
    rates = list(_rates(model))
    try:
        for owner, name, _ in rates:
            setattr(owner, name, 0.0)
        yield
    finally:
        for owner, name, rate in rates:
            setattr(owner, name, rate)


def has_dropout(model: nn.Module) -> bool:
    """Whether a module drops something in training mode."""
    return any(rate > 0 for *_, rate in _rates(model))


def _rates(model: nn.Module) -> Iterator[tuple[object, str, float]]:
    """Yields each dropout rate of the modules and of their configurations, once, with its owner and its name."""
    seen: set[tuple[int, str]] = set()
    for module in model.modules():
        is_dropout = type(module).__name__.endswith("Dropout")
        config = vars(module).get("config")
        for owner in [module, config] if isinstance(config, PreTrainedConfig) else [module]:
            for name, rate in vars(owner).items():
                is_rate = isinstance(rate, float) and ("drop" in name or (is_dropout and name == "p"))
                if is_rate and (id(owner), name) not in seen:
                    seen.add((id(owner), name))
                    yield owner, name, rate
