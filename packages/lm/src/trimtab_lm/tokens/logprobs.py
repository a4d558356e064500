"""Log-probabilities, entropies and KL of chosen tokens: the one place that applies the LM head.

No tensor [B, T, V] of logits exists at any time. The trunk runs once and gives the vectors that the LM head reads, at
counted positions only. The head is applied to chunks of them, in float32 or more, and again in backward.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trimtab_common.kl import full
from trimtab_common.sharding import whole_weights
from trimtab_lm.models.interface import Forward, Model, ModelInputs, base_of, decoder_config
from trimtab_lm.tokens.heads import forward_replaced, is_linear, last_hidden_state, lm_head_of
from trimtab_lm.tokens.positions import positioned

CHUNK_ELEMENTS = 2**24
"""Logits of one chunk: 64 MiB in float32. Two such buffers exist at a time, three with an entropy's gradient.

Smaller chunks would fragment a CPU's memory: glibc does not return freed blocks of up to 32 MiB."""

LOGIT_CHANGES = ("logit_scale", "logits_scaling", "final_logit_softcapping")
"""Settings that change the logits after the head: a factor (Cohere), a divisor (Granite), a soft cap (Gemma)."""


class TokenScores(NamedTuple):
    """Scores of N chosen tokens, in nats, float32 or more.

    Args:
        logprobs: [N], log-probability of each token.
        entropy: [N], entropy of the distribution that the token was chosen from.
    """

    logprobs: Tensor
    entropy: Tensor


def _softmax_(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns probabilities [n, V], log-probability of the targets [n] and entropy [n]; overwrites the logits [n, V].

    Works in place, with two buffers [n, V] instead of four: these buffers bound the memory of a step.
    """
    logits.sub_(logits.amax(-1, keepdim=True))
    logits.clamp_(min=torch.finfo(logits.dtype).min)  # a forbidden token: p log p is 0, not 0 x infinity
    p = logits.softmax(-1)
    logsumexp = -p.amax(-1).log()  # the largest logit is 0
    logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - logsumexp
    return p, logprobs, logsumexp - torch.linalg.vecdot(p, logits)


def _grad_logits(
    p: Tensor, entropy: Tensor, targets: Tensor, of_logprobs: Tensor | None, of_entropy: Tensor | None
) -> Tensor:
    """Returns the gradient [n, V] with respect to the logits.

    of_logprobs, of_entropy: [n], the gradients with respect to the two scores; one of them may be None, which is 0.
    """
    if of_entropy is None:
        grad = p * -cast(Tensor, of_logprobs)[:, None]
    else:  # dH/dz_j = -p_j (log p_j + H)
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
    chunks: list[slice]
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Any, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


class _ScoreLogits(torch.autograd.Function):
    """Log-probability of targets and entropy from logits [n, V]; keeps one such buffer between the passes."""

    @staticmethod
    def forward(ctx: _Context, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        p, logprobs, entropy = _softmax_(_upcast(logits) / temperature, targets)
        ctx.save_for_backward(p, entropy, targets)
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return logprobs, entropy

    @staticmethod
    def backward(ctx: _Context, *of_scores: Tensor | None) -> tuple[Tensor, None, None]:
        scaled = (x if x is None else x / ctx.temperature for x in of_scores)
        return _grad_logits(*ctx.saved_tensors, *scaled).to(ctx.dtype), None, None


class _ScoreLinear(torch.autograd.Function):
    """The same scores from what a linear head reads, chunk by chunk; the chunks share one gradient of the weight.

    Backward computes a chunk's logits again. A single chunk keeps its probabilities instead, which takes no more memory
    than forward took.
    """

    @staticmethod
    def forward(
        ctx: _Context, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        ctx.chunks = _spans(len(hidden), len(weight))
        ctx.temperature = temperature
        scores = []
        for chunk in ctx.chunks:
            p, *score = _softmax_(_linear(hidden[chunk], weight, bias, temperature), targets[chunk])
            scores.append(score)
            kept = p if len(ctx.chunks) == 1 and ctx.needs_input_grad[0] else None
            del p  # frees the buffer before the next chunk's logits
        logprobs, entropy = (torch.cat(column) for column in zip(*scores, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, kept)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: _Context, *of_scores: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy, kept = ctx.saved_tensors
        _, needs_weight, needs_bias, _, _ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden)
        # A bfloat16 sum over chunks would lose what the later ones add.
        grad_weight = torch.zeros_like(weight, dtype=entropy.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=entropy.dtype) if needs_bias else None
        for chunk in ctx.chunks:
            p = kept
            if kept is None:
                p, _, _ = _softmax_(_linear(hidden[chunk], weight, bias, ctx.temperature), targets[chunk])
            scaled = (x if x is None else x[chunk] / ctx.temperature for x in of_scores)
            grad = _grad_logits(p, entropy[chunk], targets[chunk], *scaled)
            del p
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(weight.dtype)
            torch.mm(grad, weight, out=grad_hidden[chunk])
            if grad_weight is not None and grad_weight.dtype == weight.dtype:
                grad_weight.addmm_(grad.T, hidden[chunk])
            elif grad_weight is not None:
                grad_weight += grad.T @ hidden[chunk]
            del grad
        grads = (x if x is None else x.to(weight.dtype) for x in (grad_weight, grad_bias))
        return grad_hidden, *grads, None, None


def score_logits(logits: Tensor, targets: Tensor, *, temperature: float = 1.0) -> TokenScores:
    """Scores targets under softmax(logits / temperature), in float32 or, for float64 logits, in float64.

    Args:
        logits: [N, V], any floating dtype.
        targets: [N], ids of the chosen tokens.
        temperature: of the softmax.

    Returns:
        Scores that are differentiable in the logits.
    """
    return TokenScores(*_ScoreLogits.apply(logits, targets, temperature))


def score_linear(hidden: Tensor, head: nn.Linear, targets: Tensor, *, temperature: float = 1.0) -> TokenScores:
    """Returns `score_logits(head(hidden), targets)` without holding logits [N, V].

    Args:
        hidden: [N, H], any floating dtype.
        head: [V, H], the LM head.
        targets: [N], ids of the chosen tokens.
        temperature: of the softmax.

    Returns:
        Scores that are differentiable in hidden and in the head's weight and bias.
    """
    device = hidden.device.type
    weight: Tensor = head.weight
    bias: Tensor | None = head.bias
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(device, enabled=False):
        return TokenScores(*_ScoreLinear.apply(hidden, weight, bias, targets, temperature))


class HeadInputs(NamedTuple):
    """What the heads read at N positions.

    Args:
        hidden: [N, H], the input of the LM head.
        logits: [N, V], where the LM head cannot be split off; else None.
        state: [N, hidden], the decoder's last hidden state, where it was asked for; else None.
    """

    hidden: Tensor
    logits: Tensor | None = None
    state: Tensor | None = None


class LanguageHead:
    """A transformers model as trunk and LM head: scores tokens without logits [B, T, V].

    Works for any causal or encoder-decoder model (tied heads, biases, soft-capped or scaled logits, LoRA on the head).
    The changes of the logits after the head come from the model's configuration. The constructor compares the result
    with the model's own logits. Where they differ it warns, and the model then computes its logits [N, V] itself.

    Args:
        model: a model with an LM head.
        run: the forward to call; default: the model.
    """

    def __init__(self, model: Model, run: Forward | None = None):
        self.model = model
        self.run: Forward = model if run is None else run
        base = base_of(model)
        self.config = decoder_config(model)
        self._changes = {name: getattr(self.config, name, None) for name in LOGIT_CHANGES}
        self._forward_of, self.is_encoder_decoder = base.forward, bool(base.config.is_encoder_decoder)
        self.separable = True
        with whole_weights(model):  # DeepSpeed divides weights as they are loaded
            self.separable = self._logits_agree()
        if not self.separable:
            warnings.warn(
                f"{type(base).__name__} changes its logits after the LM head in an unknown way, so it computes all of "
                "them: expect memory of positions x vocabulary. The results are right.",
                stacklevel=2,
            )

    @property
    def head(self) -> nn.Module:
        """The LM head, with the adapters and hooks that are on it."""
        return cast(nn.Module, lm_head_of(self.model))

    def score(
        self, where: Tensor, targets: Tensor, *, temperature: float = 1.0, needs_state: bool = False, **inputs: Tensor
    ) -> tuple[TokenScores, HeadInputs]:
        """Runs the model and scores targets at N positions; the LM head scores them inside its own call.

        FSDP and DeepSpeed gather a module's weights when it is called, and reduce its gradients when backward passes
        its inputs. The head's weights may therefore be read inside its call only.

        Args:
            where: bool [B, T], True at the positions, which are read row by row; or int64 [N], places in the flattened
                [B * T], in any order and with repetitions.
            targets: [N], ids of the chosen tokens.
            temperature: of the softmax.
            needs_state: whether value heads will read the decoder's last hidden state.
            inputs: `input_ids`, `attention_mask`, and for encoder-decoder models `decoder_input_ids`,
                `decoder_attention_mask`, each [B, T], padded on either side.

        Returns:
            Scores that are differentiable in the model's weights, and what the heads read.
        """
        head = self.head
        run_head = head.forward

        def score_chunk(hidden: Tensor, targets: Tensor) -> TokenScores:
            return score_logits(self._changed(run_head(hidden)), targets, temperature=temperature)

        def score_at_head(hidden: Tensor) -> TokenScores:
            if is_linear(head, run_head) and not any(self._changes.values()):
                return score_linear(hidden, cast(nn.Linear, head), targets, temperature=temperature)
            spans = _spans(len(targets), self.config.vocab_size)
            parts = [
                checkpoint(score_chunk, hidden[span], targets[span], use_reentrant=False, preserve_rng_state=False)
                for span in spans
            ]
            return TokenScores(*(torch.cat(column) for column in zip(*parts, strict=True)))

        read, scores = self._run(where, inputs, needs_state=needs_state, at_head=score_at_head)
        if read.logits is not None:
            return score_logits(read.logits, targets, temperature=temperature), read
        return TokenScores(*scores), read

    def read(self, where: Tensor, **inputs: Tensor) -> HeadInputs:
        """Runs the trunk and keeps what the LM head reads at N positions; arguments as of `score`."""
        return self._run(where, inputs, needs_state=False)[0]

    def logits(self, inputs: HeadInputs) -> Tensor:
        """Returns the model's logits [N, V] of a few positions."""
        return self._changed(self.head(inputs.hidden)) if inputs.logits is None else inputs.logits

    def _run(
        self,
        where: Tensor,
        inputs: ModelInputs,
        *,
        needs_state: bool,
        at_head: Callable[[Tensor], Sequence[Tensor]] = lambda _: (),
    ) -> tuple[HeadInputs, Sequence[Tensor]]:
        """Runs the model; the LM head computes `at_head` of what it reads at N positions, and no logits but [B, 0, V].

        Returns:
            What the heads read, and what `at_head` returned.
        """
        read: list[Tensor] = []

        def forward(run_head: Forward, states: Tensor) -> tuple[Tensor, ...]:
            read.append(_chosen(states, where))
            return (run_head(states[:, :0]), *at_head(read[0])) if self.separable else (run_head(states),)

        with forward_replaced(self.head, forward) as results:
            output = self.run(
                **positioned(self._forward_of, inputs),
                use_cache=False,
                return_dict=True,
                output_hidden_states=needs_state,
            )
        heads = HeadInputs(
            read[0],
            None if self.separable else _chosen(output.logits, where),
            _chosen(last_hidden_state(self.model, output), where) if needs_state else None,
        )
        return heads, results

    def _changed(self, logits: Tensor) -> Tensor:
        """Returns the logits as the model changes them after its head."""
        if scale := self._changes["logit_scale"]:
            logits = logits * scale
        if scale := self._changes["logits_scaling"]:
            logits = logits / scale
        if cap := self._changes["final_logit_softcapping"]:
            logits = torch.tanh(logits / cap) * cap
        return logits

    @torch.no_grad()
    def _logits_agree(self) -> bool:
        """Whether `logits` gives the model's own logits, on three tokens."""
        ids = torch.arange(1, 4, device=self.model.device)[None] % self.config.vocab_size
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.is_encoder_decoder:
            inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": torch.ones_like(ids)}
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            expected = self.run(**inputs, use_cache=False, return_dict=True).logits[0]
            logits = self.logits(self.read(torch.ones_like(ids, dtype=torch.bool), **inputs))
        finally:
            for module in training:
                module.training = True
        tolerance = 1e-3 if expected.dtype in (torch.float32, torch.float64) else 3e-2
        return logits.shape == expected.shape and torch.allclose(logits, expected, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def exact_kl(
    policy: Callable[[HeadInputs], Tensor],
    policy_inputs: HeadInputs,
    ref: Callable[[HeadInputs], Tensor],
    ref_inputs: HeadInputs,
    *,
    vocab_size: int,
    temperature: float = 1.0,
) -> Tensor:
    """Returns KL(policy, ref) over the whole vocabulary, computed in chunks of positions; see `trimtab_common.kl.full`.

    It is infinite where the reference forbids (logit -inf) a token that the policy allows.

    Args:
        policy, ref: functions from head inputs of n positions to logits [n, V], such as `LanguageHead.logits`.
        policy_inputs, ref_inputs: of the same N positions.
        vocab_size: V.
        temperature: of both distributions.

    Returns:
        [N], in nats.
    """

    def log_p(head: Callable[[HeadInputs], Tensor], inputs: HeadInputs, span: slice) -> Tensor:
        part = HeadInputs(inputs.hidden[span], None if inputs.logits is None else inputs.logits[span])
        return (_upcast(head(part)) / temperature).log_softmax(-1)

    spans = _spans(len(policy_inputs.hidden), vocab_size)
    return torch.cat([full(log_p(policy, policy_inputs, span), log_p(ref, ref_inputs, span)) for span in spans])


def _chosen(states: Tensor, where: Tensor) -> Tensor:
    """Returns states [B, T, ...] at N positions, given as a mask [B, T] or as places in [B * T]: [N, ...]."""
    return states[where] if where.dtype == torch.bool else states.flatten(0, 1).index_select(0, where)


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Returns logits at a temperature, in float32 or more, in a tensor that shares no memory with others."""
    logits = _upcast(nn.functional.linear(hidden, weight, bias))
    return logits if temperature == 1.0 else logits.div_(temperature)


def _spans(positions: int, vocab_size: int) -> list[slice]:
    """Splits the positions into runs whose logits fill one chunk; returns one empty run where there are none."""
    size = max(1, CHUNK_ELEMENTS // vocab_size)
    return [slice(start, start + size) for start in range(0, max(positions, 1), size)]


def _upcast(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
