"""Log-probability and entropy of chosen tokens from logits, or from what a linear LM head reads."""

from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn

CHUNK_ELEMENTS = 2**24
"""Logits of one chunk: 64 MiB in float32. Two such buffers exist at a time, three with an entropy's gradient.

All chunks share them: a CPU takes as long to hand out such a buffer as to fill it."""


class TokenScores(NamedTuple):
    """Scores of N chosen tokens, in nats, float32 or more.

    Args:
        logprobs: [N], log-probability of each token.
        entropy: [N], entropy of the distribution that the token was chosen from.
    """

    logprobs: Tensor
    entropy: Tensor

    @property
    def router_loss(self) -> float:
        """No loss of a router; see `RoutedScores`."""
        return 0.0


class RoutedScores(NamedTuple):
    """Scores by a mixture of experts that adds its router's loss to its own; see `trimtab_lm.tokens.router`.

    Args:
        logprobs, entropy: as of `TokenScores`.
        router_loss: scalar, times its coefficient.
    """

    logprobs: Tensor
    entropy: Tensor
    router_loss: Tensor


Scores: TypeAlias = TokenScores | RoutedScores


class _Chunk(NamedTuple):
    """Scores of n positions, and what their gradients need.

    Args:
        logprobs: [n], of the targets, in nats.
        entropy: [n], in nats.
        exponentials: [n, V], exp(logit - largest logit).
        total: [n], their sums.
    """

    logprobs: Tensor
    entropy: Tensor
    exponentials: Tensor
    total: Tensor

    def copy(self) -> "_Chunk":
        """The same with exponentials of its own: the gradient overwrites them, and another backward may read them."""
        return self._replace(exponentials=self.exponentials.clone())


def _score(logits: Tensor, targets: Tensor, out: Tensor | None = None) -> _Chunk:
    """Scores targets [n] under softmax(logits [n, V]).

    Works in place, in two buffers [n, V] instead of four: they bound the memory of a step.

    Args:
        logits: overwritten.
        targets: ids.
        out: a buffer [n, V] for the exponentials; None: a new one.
    """
    logits.sub_(logits.amax(-1, keepdim=True))
    logits.clamp_(min=torch.finfo(logits.dtype).min)  # a forbidden token: p log p is 0, not 0 x infinity
    exponentials = torch.exp(logits, out=out)
    total = exponentials.sum(-1)
    logsumexp = total.log()
    logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - logsumexp
    entropy = logsumexp - logits.mul_(exponentials).sum(-1) / total  # vecdot takes seven times as long on a CPU
    return _Chunk(logprobs, entropy, exponentials, total)


def _grad_logits(part: _Chunk, targets: Tensor, of_logprobs: Tensor | None, of_entropy: Tensor | None) -> Tensor:
    """Returns the gradient [n, V] with respect to the logits, in the place of the exponentials.

    Args:
        part: the part, of n positions.
        targets: [n], ids.
        of_logprobs: [n], the gradient with respect to the log-probabilities; None: 0.
        of_entropy: [n], the gradient with respect to the entropy; None: 0. One of the two is a tensor.
    """
    _, entropy, exponentials, total = part
    if of_entropy is None:
        grad = exponentials.mul_((-cast(Tensor, of_logprobs) / total)[:, None])
    else:  # dH/dz_j = -p_j (log p_j + H)
        p = exponentials.div_(total[:, None])
        # log p is finite where p = 0, and its product with any gradient too: p then makes the term 0.
        grad = p.clamp(min=torch.finfo(p.dtype).tiny).log_().add_(entropy[:, None]).mul_(of_entropy[:, None])
        grad = (grad if of_logprobs is None else grad.add_(of_logprobs[:, None])).mul_(p).neg_()
    if of_logprobs is not None:  # dlog p_t/dz_j = [j = t] - p_j
        grad.scatter_add_(-1, targets[:, None], of_logprobs[:, None])
    return grad


class _Context(Protocol):
    """What an autograd function remembers between its two passes."""

    temperature: float
    dtype: torch.dtype
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Any, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


class _ScoreLogits(torch.autograd.Function):
    """Log-probability of targets and entropy from logits [n, V]; keeps one such buffer between the passes."""

    @staticmethod
    def forward(ctx: _Context, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        logprobs, entropy, exponentials, total = _score(upcast(logits) / temperature, targets)
        ctx.save_for_backward(logprobs, entropy, exponentials, total, targets)
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return logprobs, entropy

    @staticmethod
    def backward(ctx: _Context, *of_scores: Tensor | None) -> tuple[Tensor, None, None]:
        *kept, targets = ctx.saved_tensors
        scaled = (x if x is None else x / ctx.temperature for x in of_scores)
        return _grad_logits(_Chunk(*kept).copy(), targets, *scaled).to(ctx.dtype), None, None


class _Gradients(NamedTuple):
    """Gradients of what a linear head reads, [N, H], and of its weight and bias where they are trained."""

    hidden: Tensor
    weight: Tensor | None
    bias: Tensor | None

    def add(self, grad: Tensor, hidden: Tensor, weight: Tensor, chunk: slice) -> None:
        """Adds those of a chunk, out of the gradient [n, V] of its logits."""
        if self.bias is not None:
            self.bias.add_(grad.sum(0))
        grad = grad.to(weight.dtype)
        torch.mm(grad, weight, out=self.hidden[chunk])
        if self.weight is not None and self.weight.dtype == weight.dtype:
            # The first chunk writes what was never set, so that nobody fills a matrix of the weight's size with zeros.
            self.weight.addmm_(grad.T, hidden[chunk], beta=float(chunk.start > 0))
        elif self.weight is not None:
            self.weight.add_(grad.T @ hidden[chunk])


class _LinearHead:
    """A linear head on N positions, chunk by chunk. All chunks that are scored share two buffers of logits.

    Args:
        hidden: [N, H].
        weight: [V, H].
        bias: [V], or None.
        temperature: the temperature of the softmax.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float):
        self.hidden, self.weight, self.bias, self.temperature = hidden, weight, bias, temperature
        self.chunks = chunks_of(len(hidden), len(weight))
        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32

    @cached_property
    def buffers(self) -> tuple[Tensor, Tensor]:
        """Logits and exponentials of a chunk."""
        shape = min(len(self.hidden), self.chunks[0].stop), len(self.weight)
        logits = torch.empty(shape, dtype=self.dtype, device=self.hidden.device)
        return logits, torch.empty_like(logits)

    def score(self, chunk: slice, targets: Tensor) -> _Chunk:
        """The scores of a chunk; its exponentials last until the next one is scored."""
        hidden = self.hidden[chunk]
        logits, exponentials = self.buffers[0][: len(hidden)], self.buffers[1][: len(hidden)]
        if hidden.dtype != self.dtype:
            logits.copy_(nn.functional.linear(hidden, self.weight, self.bias))
        elif self.bias is None:
            torch.mm(hidden, self.weight.T, out=logits)
        else:
            torch.addmm(self.bias, hidden, self.weight.T, out=logits)
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        return _score(logits, targets[chunk], out=exponentials)

    def new_gradients(self, *, needs_weight: bool, needs_bias: bool) -> _Gradients:
        """Gradients to `add` to; a bfloat16 sum over chunks would lose what the later ones add."""
        room = torch.empty_like if self.weight.dtype == self.dtype else torch.zeros_like
        return _Gradients(
            torch.empty_like(self.hidden),
            room(self.weight, dtype=self.dtype) if needs_weight else None,
            None if self.bias is None or not needs_bias else torch.zeros_like(self.bias, dtype=self.dtype),
        )


class _ScoreLinear(torch.autograd.Function):
    """The same scores from what a linear head reads, chunk by chunk; the chunks share one gradient of the weight.

    Where all log-probabilities will have one gradient, as in the mean of a cross-entropy, forward computes what it is
    multiplied by. Otherwise backward computes each chunk's logits again. A single chunk keeps its exponentials instead,
    which takes no more memory than forward took.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        is_summed: bool,
    ) -> tuple[Tensor, Tensor]:
        head, scores = _LinearHead(hidden, weight, bias, temperature), []
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        gradients = kept = None
        # Without the factor, float16 has no room for small probabilities.
        if is_summed and needs_hidden and weight.dtype != torch.float16:
            gradients = head.new_gradients(needs_weight=needs_weight, needs_bias=needs_bias)
        for chunk in head.chunks:
            part = head.score(chunk, targets)
            scores.append(part[:2])
            if gradients is not None:
                share = torch.full_like(part.total, 1 / temperature)
                gradients.add(_grad_logits(part, targets[chunk], share, None), hidden, weight, chunk)
            elif len(head.chunks) == 1 and needs_hidden:
                kept = part
        logprobs, entropy = map(torch.cat, zip(*scores, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, *(kept or (None,) * 4), *(gradients or (None,) * 3))
        ctx.set_materialize_grads(False)
        ctx.temperature = temperature
        return logprobs, entropy

    @staticmethod
    def backward(ctx: _Context, *of_scores: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, *kept, hidden_sum, weight_sum, bias_sum = ctx.saved_tensors
        of_logprobs, of_entropy = of_scores
        if hidden_sum is not None and of_entropy is None and _is_constant(cast(Tensor, of_logprobs)):
            factor = cast(Tensor, of_logprobs)[:1]  # with an axis, so that bfloat16 is multiplied in float32
            others = (x if x is None else x.mul_(factor) for x in (weight_sum, bias_sum))
            gradients = _Gradients(hidden_sum.mul_(factor), *others)
        else:
            head = _LinearHead(hidden, weight, bias, ctx.temperature)
            gradients = head.new_gradients(needs_weight=ctx.needs_input_grad[1], needs_bias=ctx.needs_input_grad[2])
            for chunk in head.chunks:
                part = head.score(chunk, targets) if kept[0] is None else _Chunk(*kept).copy()
                scaled = (x if x is None else x[chunk] / ctx.temperature for x in of_scores)
                gradients.add(_grad_logits(part, targets[chunk], *scaled), hidden, weight, chunk)
        return *(None if x is None else x.to(weight.dtype) for x in gradients), None, None, None


def _is_constant(x: Tensor) -> bool:
    """Whether all numbers of [N] are equal; the gradient of a sum says so by its stride, without waiting for a GPU."""
    return len(x) > 0 and (x.stride(0) == 0 or bool((x == x[0]).all()))


def score_logits(logits: Tensor, targets: Tensor, *, temperature: float = 1.0) -> TokenScores:
    """Scores targets under softmax(logits / temperature), in float32 or, for float64 logits, in float64.

    Args:
        logits: [N, V], any floating dtype.
        targets: [N], ids of the chosen tokens.
        temperature: the temperature of the softmax.

    Returns:
        Scores that are differentiable in the logits.
    """
    return TokenScores(*_ScoreLogits.apply(logits, targets, temperature))


def score_linear(
    hidden: Tensor, head: nn.Linear, targets: Tensor, *, temperature: float = 1.0, is_summed: bool = False
) -> TokenScores:
    """Returns `score_logits(head(hidden), targets)` without holding logits [N, V].

    Args:
        hidden: [N, H], any floating dtype.
        head: [V, H], the LM head.
        targets: [N], ids of the chosen tokens.
        temperature: the temperature of the softmax.
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
    is_summed = is_summed and torch.is_grad_enabled()
    with torch.autocast(device, enabled=False):
        return TokenScores(*_ScoreLinear.apply(hidden, weight, bias, targets, temperature, is_summed))


def chunks_of(positions: int, vocab_size: int) -> list[slice]:
    """Splits the positions into runs whose logits fill one chunk; returns one empty run where there are none."""
    size = max(1, CHUNK_ELEMENTS // vocab_size)
    return [slice(start, start + size) for start in range(0, max(positions, 1), size)]


def upcast(logits: Tensor) -> Tensor:
    """Logits in float32, or as they are in float64."""
    return logits if logits.dtype == torch.float64 else logits.float()
