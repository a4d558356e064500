"""The loss scale that fp16 has on a GPU, for a trainer in float32 on a CPU."""

from typing import Any

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer


def with_loss_scale(trainer: Any, scale: float, monkeypatch: pytest.MonkeyPatch) -> torch.amp.GradScaler:
    """Gives a trainer of PPO or DDPO a loss scale, and its optimizer the checks that go with it."""
    scaler, accelerator = torch.amp.GradScaler("cpu", init_scale=scale), trainer.accelerator
    monkeypatch.setattr(type(accelerator), "mixed_precision", property(lambda _: "fp16"))
    accelerator.native_amp, accelerator.scaler = True, scaler
    trainer.optimizer = AcceleratedOptimizer(trainer.optimizer.optimizer, scaler=scaler)
    accelerator._optimizers = [trainer.optimizer]
    return scaler
