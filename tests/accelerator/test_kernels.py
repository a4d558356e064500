"""Liger's kernels on an accelerator, where the package decides whether they are chosen."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers.integrations.liger
from tests.accelerator.runs import ACCELERATOR, Case, build

pytestmark = [pytest.mark.accelerator, pytest.mark.filterwarnings("ignore")]
SFT = Case("sft", "causal", "full", "float32")


def test_without_the_package_one_line_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.warns(UserWarning, match="without use_liger_kernel: .*liger_kernel"):
        assert not build(SFT, tmp_path, use_liger_kernel=True).args.use_liger_kernel


def test_the_package_replaces_all_but_the_losses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked: list[dict[str, Any]] = []
    kernels: Any = ModuleType("liger_kernel.transformers")
    kernels._apply_liger_kernel_to_instance = lambda **kwargs: asked.append(kwargs)
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", kernels)
    monkeypatch.setattr(transformers.integrations.liger, "is_liger_kernel_available", lambda: True)
    trainer = build(SFT, tmp_path, use_liger_kernel=True)
    trainer.train()
    assert trainer.args.device.type == ACCELERATOR
    assert asked == [{"model": trainer.model, "fused_linear_cross_entropy": False, "cross_entropy": False}]
