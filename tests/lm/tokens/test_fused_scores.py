"""What an accelerator computes between the head's matrix products equals what a CPU computes, compiled or not."""

import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.ir
from tests.lm.tokens.test_scores import CONSTANT, VARIED, VOCABULARY, WIDTH, gradients, linear_head
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from trimtab_lm.compat.compiling import compiled_for_any_length
from trimtab_lm.tokens import scores

CLOSE = {torch.float32: {"rtol": 2e-5, "atol": 1e-6}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the CPU take the accelerator's way, uncompiled, with the product that only CUDA adds in float32."""

    def addmm(total: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert total is out
        assert total.dtype == out_dtype == torch.float32
        return out.add_(a.to(out_dtype) @ b.to(out_dtype))

    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(scores, "fused_score", lambda device: scores._score_and_gradient)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("chunk", [4 * VOCABULARY, 10**9], ids=["chunks", "one chunk"])
@pytest.mark.parametrize("is_summed", [True, False])
@pytest.mark.parametrize("weights", [CONSTANT, VARIED], ids=["constant", "varied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_equal_those_of_whole_logits(
    chunk: int, is_summed: bool, weights: Tensor, dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scores, "CHUNK_ELEMENTS", chunk)
    hidden, head, targets = linear_head(dtype, bias=bias)
    ours = gradients(hidden, head, targets, weights, is_summed=is_summed)
    exact = gradients(
        hidden.detach().double().requires_grad_(), head.double(), targets, weights.double(), is_whole=True
    )
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, **CLOSE[dtype])


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("chunk", [4 * VOCABULARY, 10**9], ids=["chunks", "one chunk"])
def test_an_entropy_in_the_loss_has_its_gradient(chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scores, "CHUNK_ELEMENTS", chunk)
    hidden, head, targets = linear_head()
    both = scores.score_linear(hidden, head, targets)
    (ours,) = torch.autograd.grad((VARIED * both.logprobs).sum() + both.entropy.sum(), [hidden])
    log_p = head(hidden).log_softmax(-1)
    plain = (VARIED * log_p.gather(-1, targets[:, None])[:, 0]).sum() - (log_p.exp() * log_p).sum()
    torch.testing.assert_close(ours, torch.autograd.grad(plain, [hidden])[0], rtol=1e-12, atol=1e-14)


@pytest.mark.usefixtures("fused")
def test_logits_that_the_caller_keeps_are_not_overwritten():
    logits = torch.randn(3, 5, requires_grad=True)
    before = logits.detach().clone()
    ours = scores.score_logits(logits, torch.tensor([0, 4, 2]), temperature=0.5)
    assert torch.equal(logits, before)
    plain = (logits / 0.5).log_softmax(-1)[range(3), [0, 4, 2]]
    torch.testing.assert_close(ours.logprobs, plain)
    (a,), (b,) = (torch.autograd.grad(x.sum(), [logits]) for x in (ours.logprobs, plain))
    torch.testing.assert_close(a, b)
    assert scores.score_logits(logits.detach(), torch.tensor([0, 4, 2])).logprobs.grad_fn is None


def test_a_cpu_and_the_meta_device_compile_nothing():
    assert scores.fused_score(torch.device("cpu")) is None
    assert scores.fused_score(torch.device("meta")) is None


@pytest.mark.slow
@pytest.mark.usefixtures("fused")
def test_scores_are_compiled_once_for_chunks_of_any_length_with_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch,
):
    torch.compiler.reset()
    compiled = compiled_for_any_length(scores._score_and_gradient)
    monkeypatch.setattr(scores, "fused_score", lambda device: compiled)
    for length, stance in ((5, "default"), (7, "fail_on_recompile"), (11, "fail_on_recompile")):
        monkeypatch.setattr(scores, "CHUNK_ELEMENTS", length * VOCABULARY)
        for weights in (CONSTANT, VARIED):
            parts = linear_head(torch.float32)
            expected = gradients(*parts, weights, is_whole=True)
            with torch.compiler.set_stance(stance):
                ours = gradients(*parts, weights)
            for a, b in zip(ours, expected, strict=True):
                torch.testing.assert_close(a, b, **CLOSE[torch.float32])


def test_a_program_that_is_compiled_calls_the_head_and_does_not_trace_it():
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def loss(hidden: Tensor) -> Tensor:
        of_head = scores.score_linear(2 * hidden, head, targets).logprobs
        return of_head + scores.score_logits(2 * hidden, targets % WIDTH).logprobs

    torch.compiler.reset()
    hidden, head, targets = linear_head()
    torch.testing.assert_close(torch.compile(loss, backend=backend)(hidden), loss(hidden))
    called = {node.target for graph in graphs for node in graph.graph.nodes if node.op.startswith("call")}
    assert called == {operator.mul, operator.mod, operator.add}


ROWS, COLUMNS = 24, 3072


@pytest.mark.slow
@pytest.mark.parametrize("grads", [(False, False), (True, False), (True, True)], ids=["none", "logprobs", "both"])
def test_the_compiler_reads_the_logits_three_times_and_keeps_none_in_float32(
    grads: tuple[bool, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`tools.roofline` counts these passes. For a CPU alone, the compiler would keep exponentials in memory."""
    monkeypatch.setattr(torch._inductor.ir, "is_cpu", lambda x: False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # the cache knows graphs, and not this choice
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(ROWS, COLUMNS, generator=generator)).bfloat16()
    logits[0, 7] = -torch.inf  # a forbidden token
    targets = torch.randint(8, COLUMNS, (ROWS,), generator=generator)
    given = (torch.randn(ROWS, generator=generator) if has else None for has in grads)
    inputs = (logits, targets, *given, 0.7)
    torch.compiler.reset()
    results, (code,) = run_and_get_code(torch.compile(scores._score_and_gradient), *inputs)
    for result, expected in zip(results, scores._score_and_gradient(*inputs), strict=True):
        if result is not None:  # one unit in the last place of the logits' bfloat16
            torch.testing.assert_close(result, expected, rtol=8e-3 if result.dim() == 2 else 1e-5, atol=1e-5)
    whole = re.findall(rf"empty_strided_cpu\(\({ROWS}, {COLUMNS}\), .*?torch\.(\w+)\)", code)
    passes = re.findall(rf"<static_cast<int64_t>\({COLUMNS}L\); x1\+=", code)
    assert (whole, len(passes)) == ((["bfloat16"], 3) if any(grads) else ([], 2))
