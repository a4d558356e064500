"""Log-probability and entropy of chosen tokens from logits, or from what an LM head reads."""

from collections.abc import Callable, Sequence
from functools import cache
from logging import getLogger
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trimtab_common.accelerators import memory_of
from trimtab_lm.compat.compiling import compiled_for_any_length

CHUNK_ELEMENTS = 2**24
"""Logits of one chunk on a CPU: 64 MiB in float32. Two such buffers exist at a time.

All chunks share them: a CPU takes as long to hand out such a buffer as to fill it."""
DEVICE_SHARE = 32
"""On an accelerator the two buffers fill 1 / 32 of its memory, because each chunk reads and writes the gradient of the
whole head. All of the memory counts, and not what is free, so that a run can be repeated."""


class TokenScores(NamedTuple):
    """Scores of N chosen tokens, in nats, float32 or more.

    Args:
        logprobs: [N], log-probability of each token.
        entropy: [N], entropy of the distribution that the token was chosen from.
        router_loss: the loss that a mixture of experts adds for its router, times its coefficient; see `tokens.router`.
        read: [N, ...], what the LM head read; see `LanguageHead.logits`. Only where it was asked for.
        state: [N, H], the decoder's last hidden state, which value heads read. Only where it was asked for.
    """

    logprobs: Tensor
    entropy: Tensor
    router_loss: Tensor | float = 0.0
    read: Tensor | None = None
    state: Tensor | None = None


@torch.compiler.disable  # the head has a compiled function of its own, which finds out what the device can do
def score_logits(logits: Tensor, targets: Tensor, *, temperature: float = 1.0) -> TokenScores:
    """Scores targets under softmax(logits / temperature), in float32 or, for float64 logits, in float64.

    Args:
        logits: [N, V], any floating dtype.
        targets: [N], ids of the chosen tokens.

    Returns:
        Scores that are differentiable in the logits.
    """
    return TokenScores(*_ScoreLogits.apply(logits, targets, temperature, False))


def score_chunks(
    head: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, *, vocab_size: int, temperature: float = 1.0
) -> TokenScores:
    """Returns `score_logits(head(hidden), targets)` for any head, which backward runs again; holds one chunk of logits.

    Args:
        head: from [n, H] to logits [n, V].
        hidden: [N, H].
        targets: [N], ids of the chosen tokens.
    """

    def score(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return score_logits(head(hidden), targets, temperature=temperature)[:2]

    size = chunk_size(vocab_size, hidden.device)
    chunks = zip(hidden.split(size), targets.split(size), strict=True)
    parts = [checkpoint(score, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    return TokenScores(*map(torch.cat, zip(*parts, strict=True)))


@torch.compiler.disable
def score_linear(
    hidden: Tensor, head: nn.Linear, targets: Tensor, *, temperature: float = 1.0, is_summed: bool = False
) -> TokenScores:
    """Returns `score_logits(head(hidden), targets)` without holding logits [N, V].

    Args:
        hidden: [N, H], any floating dtype.
        head: [V, H], the LM head.
        targets: [N], ids of the chosen tokens.
        is_summed: whether the loss is a sum or a mean of the log-probabilities. Its gradient is then computed in
            forward, and no logits twice. The gradient of another loss is right too, and costs more.

    Returns:
        Scores that are differentiable in hidden and in the head's weight and bias.
    """
    device = hidden.device.type
    weight: Tensor = head.weight
    bias: Tensor | None = head.bias
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    # Without the factor of the loss, float16 has no room for small probabilities.
    is_summed = is_summed and hidden.requires_grad and torch.is_grad_enabled() and weight.dtype != torch.float16
    with torch.autocast(device, enabled=False):
        if not is_summed and len(hidden) <= chunk_size(len(weight), weight.device):
            logits = nn.functional.linear(hidden, weight, bias)
            return TokenScores(*_ScoreLogits.apply(logits, targets, temperature, True))
        return TokenScores(*_ScoreLinear.apply(hidden, weight, bias, targets, temperature, is_summed))


def chunk_size(vocab_size: int, device: torch.device) -> int:
    """The positions whose logits fill one chunk."""
    return max(1, max(CHUNK_ELEMENTS, memory_of(device) // (DEVICE_SHARE * 2 * 4)) // vocab_size)


def upcast(x: Tensor) -> Tensor:
    """Numbers in float32, or as they are in float64."""
    return x if x.dtype == torch.float64 else x.float()


class _ScoreLogits(torch.autograd.Function):
    """Log-probability of targets and entropy from logits [n, V]; keeps one such buffer between the passes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float, overwrites: bool) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.dtype, ctx.fused = temperature, logits.dtype, fused_score(logits.device)
        if ctx.fused:
            ctx.save_for_backward(logits, targets)
            return ctx.fused(logits, targets, None, None, temperature)[:2]
        scaled = upcast(logits)
        if not overwrites:
            scaled = scaled / temperature
        elif temperature != 1.0:
            scaled.div_(temperature)
        exponentials = torch.empty_like(scaled)
        logprobs, entropy, total = _score(scaled, targets, exponentials)
        ctx.save_for_backward(exponentials, total, entropy, targets)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, of_logprobs: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.fused:
            return ctx.fused(*ctx.saved_tensors, of_logprobs, of_entropy, ctx.temperature)[2], None, None, None
        grad = _gradient(of_logprobs, of_entropy, *ctx.saved_tensors, temperature=ctx.temperature)
        return grad.to(ctx.dtype), None, None, None


class _ScoreLinear(torch.autograd.Function):
    """The same scores from what a linear head reads, chunk by chunk.

    Where all log-probabilities will have one gradient, as in the mean of a cross-entropy, forward computes what it is
    multiplied by. Otherwise backward computes each chunk's logits again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        is_summed: bool,
    ) -> tuple[Tensor, Tensor]:
        inputs, ones = (hidden, weight, bias, targets), upcast(hidden.new_ones(len(hidden))) if is_summed else None
        logprobs, entropy, gradients = _run_linear(*inputs, temperature, ones, None, ctx.needs_input_grad)
        ctx.save_for_backward(*inputs, *gradients)
        ctx.set_materialize_grads(False)
        ctx.temperature = temperature
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, of_logprobs: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, *gradients = ctx.saved_tensors
        if gradients[0] is not None and of_logprobs is not None and of_entropy is None and _is_constant(of_logprobs):
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(of_logprobs[:1])  # with an axis, so that bfloat16 is multiplied in float32
        else:
            head = hidden, weight, bias, targets, ctx.temperature
            _, _, gradients = _run_linear(*head, of_logprobs, of_entropy, ctx.needs_input_grad)
        return *(None if gradient is None else gradient.to(weight.dtype) for gradient in gradients), None, None, None


def _is_constant(x: Tensor) -> bool:
    """Whether all numbers of [N] are equal; the gradient of a sum says so by its stride, without waiting for a GPU."""
    return len(x) > 0 and (x.stride(0) == 0 or bool((x == x[0]).all()))


def _run_linear(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    of_logprobs: Tensor | None,
    of_entropy: Tensor | None,
    needs_grad: Sequence[bool],
) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
    """Scores N targets under a linear head, chunk by chunk. On a CPU two buffers of logits serve all chunks.

    Args:
        hidden, weight, bias, targets, temperature: see `score_linear`.
        of_logprobs, of_entropy: see `_gradient`; None: there are no gradients.
        needs_grad: whether hidden (which always gets one), weight and bias need gradients.

    Returns:
        Log-probabilities [N], entropies [N], and the gradients of hidden, weight and bias, if there are any.
    """
    size, fused = chunk_size(len(weight), weight.device), fused_score(weight.device)
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    room = hidden.new_empty(2, 0 if fused else min(size, len(hidden)), len(weight), dtype=dtype)
    logprobs, entropy = hidden.new_empty(len(hidden), dtype=dtype), hidden.new_empty(len(hidden), dtype=dtype)
    has_grad = of_logprobs is not None or of_entropy is not None
    grad_hidden, grad_weight, grad_bias = torch.empty_like(hidden) if has_grad else None, None, None
    for start in range(0, max(len(hidden), 1), size):
        chunk = slice(start, start + size)
        x, ids = hidden[chunk], targets[chunk]
        first, second = (None if of is None else of[chunk] for of in (of_logprobs, of_entropy))
        if fused:
            logits = nn.functional.linear(x, weight, bias)
            logprobs[chunk], entropy[chunk], grad = fused(logits, ids, first, second, temperature)
        else:
            logits, exponentials = room[:, : len(x)]
            if x.dtype != dtype:
                logits.copy_(nn.functional.linear(x, weight, bias))
            else:
                torch.addmm(logits if bias is None else bias, x, weight.T, beta=bias is not None, out=logits)
            if temperature != 1.0:
                logits.div_(temperature)
            logprobs[chunk], entropy[chunk], total = _score(logits, ids, exponentials)
            if has_grad:
                parts = exponentials, total, entropy[chunk], ids
                grad = _gradient(first, second, *parts, temperature=temperature, out=logits)
        if grad_hidden is None:
            continue
        if bias is not None and needs_grad[2]:
            of_bias = grad.sum(0, dtype=dtype)
            grad_bias = of_bias if grad_bias is None else grad_bias.add_(of_bias)
        grad = grad.to(weight.dtype)
        torch.mm(grad, weight, out=grad_hidden[chunk])
        if not needs_grad[1]:
            continue
        if grad_weight is None:
            grad_weight = (grad.T @ x).to(dtype)  # a bfloat16 sum over chunks would lose what the later ones add
        elif grad_weight.dtype == grad.dtype:
            grad_weight.addmm_(grad.T, x)
        elif fused:
            torch.addmm(grad_weight, grad.T, x, out_dtype=dtype, out=grad_weight)
        else:
            grad_weight.add_(grad.T @ x)
    return logprobs, entropy, (grad_hidden, grad_weight, grad_bias)


@cache
def fused_score(device: torch.device) -> Callable[..., tuple[Tensor, Tensor, Any]] | None:
    """Returns `_score_and_gradient`, compiled for an accelerator; None on a CPU, and where something is missing.

    TORCH_COMPILE_DISABLE=1 switches the compiler off.
    """
    if device.type in ("cpu", "meta"):
        return None
    try:
        x = torch.ones(8, 8, device=device, dtype=torch.bfloat16)
        torch.addmm(x.float(), x, x, out_dtype=torch.float32)
        torch.compile(torch.neg)(x)
    except RuntimeError as error:
        getLogger(__name__).warning(f"The LM head is slower on {device}, uncompiled: {str(error).splitlines()[0]}")
        return None
    return compiled_for_any_length(_score_and_gradient)


def _score_and_gradient(
    logits: Tensor, targets: Tensor, of_logprobs: Tensor | None, of_entropy: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probabilities, entropies and gradient of logits [n, V]. Compiled, it holds no number of [n, V] in float32."""
    scaled = upcast(logits) / temperature
    exponentials = torch.empty_like(scaled)
    logprobs, entropy, total = _score(scaled, targets, exponentials)
    if of_logprobs is None and of_entropy is None:
        return logprobs, entropy, None
    grad = _gradient(of_logprobs, of_entropy, exponentials, total, entropy, targets, temperature=temperature)
    return logprobs, entropy, grad.to(logits.dtype)


def _score(logits: Tensor, targets: Tensor, exponentials: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores targets [n] under softmax(logits [n, V]), in place: two buffers [n, V] bound the memory of a step.

    Args:
        logits: overwritten.
        targets: ids.
        exponentials: [n, V], is filled with exp(logit - largest logit).

    Returns:
        Log-probabilities [n] of the targets and entropies [n], in nats, and the sums [n] of the exponentials.
    """
    logits.sub_(logits.amax(-1, keepdim=True))
    logits.clamp_(min=torch.finfo(logits.dtype).min)  # a forbidden token: p log p is 0, not 0 x infinity
    torch.exp(logits, out=exponentials)
    total = exponentials.sum(-1)
    logsumexp = total.log()
    logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - logsumexp
    entropy = logsumexp - logits.mul_(exponentials).sum(-1) / total  # vecdot takes seven times as long on a CPU
    return logprobs, entropy, total


def _gradient(
    of_logprobs: Tensor | None,
    of_entropy: Tensor | None,
    exponentials: Tensor,
    total: Tensor,
    entropy: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    out: Tensor | None = None,
) -> Tensor:
    """Returns the gradient [n, V] with respect to the logits, before the temperature divides them.

    Args:
        of_logprobs, of_entropy: [n], the gradients with respect to the two scores; None: 0.
        exponentials, total, entropy, targets: see `_score`.
        out: a buffer [n, V] for the result, other than the exponentials; None: a new one.
    """
    of_logprobs = torch.zeros_like(entropy) if of_logprobs is None else of_logprobs / temperature
    if of_entropy is None:
        grad = torch.mul(exponentials, (-of_logprobs / total)[:, None], out=out)
    else:  # dH/dz_j = -p_j (log p_j + H)
        # log p is finite where p = 0, and its product with any gradient too: p then makes the term 0.
        grad = torch.div(exponentials, total[:, None], out=out).clamp_(min=torch.finfo(total.dtype).tiny).log_()
        grad.add_(entropy[:, None]).mul_((of_entropy / temperature)[:, None]).add_(of_logprobs[:, None])
        grad.mul_(exponentials).div_(-total[:, None])
    # dlog p_t/dz_j = [j = t] - p_j
    if torch.compiler.is_compiling():  # a scatter would write the whole gradient to memory and read it again
        columns = torch.arange(grad.shape[-1], device=grad.device)
        return torch.where(columns == targets[:, None], grad + of_logprobs[:, None], grad)
    return grad.scatter_add_(-1, targets[:, None], of_logprobs[:, None])
