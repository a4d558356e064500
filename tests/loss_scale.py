"""Gives a float32 trainer on a CPU the loss scale that fp16 has on a GPU."""

from typing import Any

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer


def with_loss_scale(trainer: Any, scale: float, monkeypatch: pytest.MonkeyPatch) -> torch.amp.GradScaler:
    """Gives a PPO or DDPO trainer a loss scale, and its optimizer the matching checks."""
    scaler, accelerator = torch.amp.GradScaler("cpu", init_scale=scale), trainer.accelerator
    monkeypatch.setattr(type(accelerator), "mixed_precision", property(lambda _: "fp16"))
    accelerator.native_amp, accelerator.scaler = True, scaler
    trainer.optimizer = AcceleratedOptimizer(trainer.optimizer.optimizer, scaler=scaler)
    accelerator._optimizers = [trainer.optimizer]
    return scaler
