"""A linear head's scores and their gradients equal those from whole logits, however they are computed."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trimtab_lm.tokens import scores

POSITIONS, WIDTH, VOCABULARY = 11, 6, 30
EXACT = {torch.float64: {"rtol": 1e-12, "atol": 1e-14}, torch.float32: {"rtol": 2e-5, "atol": 1e-7}}


def linear_head(dtype: torch.dtype = torch.float64, *, bias: bool = True) -> tuple[Tensor, nn.Linear, Tensor]:
    generator = torch.Generator().manual_seed(3)
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    hidden = torch.randn(POSITIONS, WIDTH, generator=generator).to(dtype).requires_grad_()
    return hidden, head, torch.randint(VOCABULARY, (POSITIONS,), generator=generator)


def gradients(
    hidden: Tensor, head: nn.Linear, targets: Tensor, weights: Tensor, *, is_whole: bool = False, is_summed: bool = True
) -> list[Tensor]:
    """Returns the gradients of the weighted mean of the log-probabilities, at temperature 0.7."""
    if is_whole:
        logprobs = (head(hidden) / 0.7).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    else:
        logprobs = scores.score_linear(hidden, head, targets, temperature=0.7, is_summed=is_summed).logprobs
    loss = (-3.0 / POSITIONS) * (weights * logprobs).sum()
    return list(torch.autograd.grad(loss, [hidden, *(x for x in head.parameters() if x.requires_grad)]))


CONSTANT, VARIED = torch.ones(()), torch.linspace(-1, 2, POSITIONS)


@pytest.mark.parametrize("chunk", [4 * VOCABULARY, 10**9], ids=["chunks", "one chunk"])
@pytest.mark.parametrize("weights", [CONSTANT, VARIED], ids=["constant", "varied"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
def test_the_gradient_of_a_sum_is_right_for_any_weights(
    chunk: int, weights: Tensor, dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scores, "CHUNK_ELEMENTS", chunk)
    parts = linear_head(dtype, bias=bias)
    expected = gradients(*parts, weights.to(dtype), is_whole=True)
    for is_summed in (True, False):
        for a, b in zip(gradients(*parts, weights.to(dtype), is_summed=is_summed), expected, strict=True):
            torch.testing.assert_close(a, b, **EXACT[dtype])


def test_an_accelerator_takes_chunks_by_its_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (2**30, 80 * 2**30))
    assert scores.chunk_size(128_256, torch.device("cpu")) == 130
    assert scores.chunk_size(128_256, torch.device("cuda:6")) == 2616

    def unknown(device: torch.device) -> tuple[int, int]:
        raise RuntimeError("not implemented")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", unknown)
    assert scores.chunk_size(128_256, torch.device("cuda:7")) == 130


def test_a_sum_applies_the_head_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scores, "CHUNK_ELEMENTS", 4 * VOCABULARY)
    calls: list[int] = []
    score = scores._score
    monkeypatch.setattr(scores, "_score", lambda logits, *rest: calls.append(len(logits)) or score(logits, *rest))
    for is_summed, weights, times in ((True, CONSTANT, 1), (True, VARIED, 2), (False, CONSTANT, 2)):
        calls.clear()
        gradients(*linear_head(), weights, is_summed=is_summed)
        assert len(calls) == 3 * times


def test_an_entropy_in_the_loss_has_its_gradient():
    hidden, head, targets = linear_head()
    both = scores.score_linear(hidden, head, targets, is_summed=True)
    (ours,) = torch.autograd.grad(both.logprobs.sum() + both.entropy.sum(), [hidden])
    log_p = head(hidden).log_softmax(-1)
    plain = log_p.gather(-1, targets[:, None]).sum() - (log_p.exp() * log_p).sum()
    torch.testing.assert_close(ours, torch.autograd.grad(plain, [hidden])[0], **EXACT[torch.float64])


class Buffers(TorchDispatchMode):
    """Keeps every tensor [.., vocabulary] that an operation returns, so that no storage is reused."""

    def __init__(self):
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dim() > 1 and result.shape[-1] == VOCABULARY:
            self.seen.append(result)
        return result


@pytest.mark.parametrize("entropy_weight", [0.0, 1.0])
def test_two_buffers_of_a_chunk_serve_all_chunks(entropy_weight: float, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scores, "CHUNK_ELEMENTS", 4 * VOCABULARY)
    hidden, head, targets = linear_head()
    with Buffers() as buffers:
        both = scores.score_linear(hidden, head, targets)
        loss = (VARIED * both.logprobs).sum() + (entropy_weight * both.entropy.sum() if entropy_weight else 0.0)
        buffers.seen.clear()
        torch.autograd.grad(loss, [hidden])
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in buffers.seen}
    del sizes[head.weight.untyped_storage().data_ptr()]
    assert sum(sizes.values()) == 2 * 4 * VOCABULARY * hidden.element_size()


def test_bfloat16_does_not_round_the_factor_of_the_mean():
    """3 / 11 in bfloat16 would be a quarter of a per cent too large, and so would every number."""
    hidden, head, targets = linear_head()
    exact = gradients(hidden, head, targets, CONSTANT, is_whole=True)
    half = gradients(hidden.detach().bfloat16().requires_grad_(), head.bfloat16(), targets, CONSTANT)
    for ours, expected in zip(half, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        share = float((ours.double() * expected).sum() / expected.square().sum())
        assert share == pytest.approx(1, abs=1e-3)


def test_float16_keeps_small_probabilities_for_the_loss_scale():
    """A probability of e^-18 is 0 in float16, but its gradient is not once a loss scale multiplies it."""
    head = nn.Linear(1, 3, bias=False, dtype=torch.float16)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[18.0], [18.0], [0.0]]))
    hidden = torch.ones(2, 1, dtype=torch.float16, requires_grad=True)
    logprobs = scores.score_linear(hidden, head, torch.tensor([0, 1]), is_summed=True).logprobs
    (-65536.0 * logprobs.mean()).backward()
    assert float(head.weight.grad[2]) == pytest.approx(65536 * 0.5 * torch.tensor(-18.0).exp().item(), rel=1e-2)


def test_a_frozen_head_has_no_gradient_and_an_evaluation_none_at_all(monkeypatch: pytest.MonkeyPatch):
    hidden, head, targets = linear_head()
    expected = gradients(hidden, head, targets, CONSTANT, is_whole=True)[0]
    head.requires_grad_(False)
    torch.testing.assert_close(gradients(hidden, head, targets, CONSTANT)[0], expected, **EXACT[torch.float64])
    monkeypatch.setattr(scores, "_gradient", None)
    with torch.no_grad():
        scores.score_linear(hidden, head, targets, is_summed=True)


def test_a_second_backward_is_right_or_refused():
    """The gradient of a sum is multiplied in place; torch notices a second time."""
    hidden, head, targets = linear_head()
    logprobs = scores.score_linear(hidden, head, targets).logprobs
    first, second = (torch.autograd.grad(logprobs.sum(), [hidden], retain_graph=True)[0] for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    loss = scores.score_linear(hidden, head, targets, is_summed=True).logprobs.sum()
    torch.autograd.grad(loss, [hidden], retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, [hidden])
