"""The LM head on an accelerator: what it computes where PyTorch can compile for the device, and where it cannot."""

import logging
from types import ModuleType

import pytest
import torch
from tests.accelerator.runs import ACCELERATOR
from tests.lm.tokens.test_fused_scores import CLOSE, fused
from tests.lm.tokens.test_scores import CONSTANT, VARIED, VOCABULARY, gradients, linear_head
from torch import Tensor

from trimtab_lm.tokens import scores

pytestmark = pytest.mark.accelerator
_ = fused  # a fixture


def on_device(weights: Tensor, *, is_summed: bool) -> list[Tensor]:
    hidden, head, targets = linear_head(torch.bfloat16)
    hidden, targets = hidden.detach().to(ACCELERATOR).requires_grad_(), targets.to(ACCELERATOR)
    return gradients(hidden, head.to(ACCELERATOR), targets, weights.to(ACCELERATOR), is_summed=is_summed)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("is_summed", [True, False])
@pytest.mark.parametrize("elements", [4 * VOCABULARY, 10**9], ids=["chunks", "one chunk"])
def test_the_function_that_is_compiled_stays_on_the_device(
    device: ModuleType, elements: int, is_summed: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scores, "chunk_size", lambda vocab_size, device: elements // vocab_size)
    hidden, head, targets = linear_head()
    exact = gradients(hidden, head, targets, VARIED, is_whole=True)
    device.clear()
    ours = on_device(VARIED, is_summed=is_summed)
    assert device.waits() == ({"item": 1} if is_summed else {})  # whether all weights are equal
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, **CLOSE[torch.bfloat16])


@pytest.mark.skipif(ACCELERATOR != "cuda", reason="needs a GPU, for which PyTorch compiles")
@pytest.mark.parametrize("is_summed", [True, False])
def test_a_gpu_compiles_it_and_computes_the_same(is_summed: bool, caplog: pytest.LogCaptureFixture):
    scores.fused_score.cache_clear()
    hidden, head, targets = linear_head()
    exact = gradients(hidden, head, targets, VARIED, is_whole=True)
    with caplog.at_level(logging.WARNING):
        ours = on_device(VARIED, is_summed=is_summed)
    assert not caplog.records
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, **CLOSE[torch.bfloat16])


@pytest.mark.usefixtures("device")
def test_a_device_without_a_compiler_says_so_once_and_computes_the_same(caplog: pytest.LogCaptureFixture):
    scores.fused_score.cache_clear()
    with caplog.at_level(logging.WARNING):
        results = [on_device(CONSTANT, is_summed=True) for _ in range(2)]
    assert [record.message[:45] for record in caplog.records] == ["The LM head is slower on musa:0, uncompiled: "]
    hidden, head, targets = linear_head()
    for result in results:
        for a, b in zip(result, gradients(hidden, head, targets, CONSTANT, is_whole=True), strict=True):
            torch.testing.assert_close(a.cpu().double(), b, **CLOSE[torch.bfloat16])
