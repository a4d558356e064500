"""Log-probabilities, entropies and KL of chosen tokens: the one place that applies the LM head.

No `[batch, time, vocab]` tensor is ever made. The trunk runs once and gives the vectors that the LM head reads, at the
positions that count alone; the head is then applied to chunks of them, in float32 at least, and again in backward.
"""

import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trimtab_common.kl import full
from trimtab_lm.tokens.heads import last_hidden_state, lm_head_of

CHUNK_ELEMENTS = 2**24
"""Logits of one chunk: 64 MiB in float32; two such buffers are alive at a time, three with an entropy's gradient.

Not less, on a CPU: glibc keeps freed blocks of up to 32 MiB for itself, and fragments."""


LOGIT_CHANGES = ("logit_scale", "logits_scaling", "final_logit_softcapping")
"""What configurations call a change of the logits behind the head: Cohere, Granite, Gemma."""


class TokenScores(NamedTuple):
    """Both [N], in nats, float32 at least: log-probability of the chosen tokens, entropy of the distributions."""

    logprobs: Tensor
    entropy: Tensor


def _softmax_(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities [n, V], log-probability of the targets [n] and entropy [n]; overwrites the logits [n, V].

    In place, so that two buffers of the vocabulary's size are alive and not four: they bound the memory of a step.
    """
    logits.sub_(logits.amax(-1, keepdim=True))
    logits.clamp_(min=torch.finfo(logits.dtype).min)  # a forbidden token: p log p is 0, not 0 x infinity
    p = logits.softmax(-1)
    logsumexp = -p.amax(-1).log()  # the largest logit is 0 now
    logprobs = logits.gather(-1, targets[:, None]).squeeze(-1) - logsumexp
    return p, logprobs, logsumexp - torch.linalg.vecdot(p, logits)


def _grad_logits(p: Tensor, entropy: Tensor, targets: Tensor, of_logprobs: Any, of_entropy: Any) -> Tensor:
    """Gradient with respect to the logits, [n, V], of log-probabilities and entropies with gradients [n], or None."""
    if of_entropy is None:
        grad = p * -of_logprobs[:, None]
    else:  # dH/dz_j = -p_j (log p_j + H)
        # log p is finite where p = 0, and its product with any gradient too: p then makes the term 0.
        grad = p.clamp(min=torch.finfo(p.dtype).tiny).log_().add_(entropy[:, None]).mul_(of_entropy[:, None])
        grad = (grad if of_logprobs is None else grad.add_(of_logprobs[:, None])).mul_(p).neg_()
    if of_logprobs is not None:  # dlog p_t/dz_j = [j = t] - p_j
        grad.scatter_add_(-1, targets[:, None], of_logprobs[:, None])
    return grad


class _ScoreLogits(torch.autograd.Function):
    """Log-probability of a target and entropy from logits [n, V], holding one such buffer between the passes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        p, logprobs, entropy = _softmax_(_upcast(logits) / temperature, targets)
        ctx.save_for_backward(p, entropy, targets)
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *of_scores: Tensor | None) -> tuple[Tensor, None, None]:
        scaled = (x if x is None else x / ctx.temperature for x in of_scores)
        return _grad_logits(*ctx.saved_tensors, *scaled).to(ctx.dtype), None, None


class _ScoreLinear(torch.autograd.Function):
    """The same from what a linear head reads, chunk by chunk, with one gradient of its weight for all chunks.

    A chunk's logits are computed again in backward, unless there is only one: its probabilities are then kept, which
    takes no more memory than forward took.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        ctx.chunks = _spans(len(hidden), len(weight))
        ctx.temperature = temperature
        scores = []
        for chunk in ctx.chunks:
            p, *score = _softmax_(_linear(hidden[chunk], weight, bias, temperature), targets[chunk])
            scores.append(score)
            kept = p if len(ctx.chunks) == 1 and ctx.needs_input_grad[0] else None
            del p  # before the next chunk's logits are made
        logprobs, entropy = (torch.cat(column) for column in zip(*scores, strict=True))
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, kept)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *of_scores: Tensor | None) -> tuple[Tensor | None, ...]:
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
    """Log-probability of `targets` [N] and entropy under softmax(logits / temperature); logits [N, V], any dtype.

    Differentiable in both. Computed in float32, or float64 for such logits.
    """
    return TokenScores(*_ScoreLogits.apply(logits, targets, temperature))


def score_linear(hidden: Tensor, head: nn.Linear, targets: Tensor, *, temperature: float = 1.0) -> TokenScores:
    """`score_logits(head(hidden), targets)` for hidden [N, H], without ever holding logits [N, V]."""
    device = hidden.device.type
    weight: Tensor = head.weight
    bias: Tensor | None = head.bias
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(device, enabled=False):
        return TokenScores(*_ScoreLinear.apply(hidden, weight, bias, targets, temperature))


def positioned(forward: Callable[..., Any], inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inputs with position ids that count real tokens, if `forward` takes any: else GPT-2 reads padding as text."""
    if "position_ids" in inputs or "position_ids" not in inspect.signature(forward).parameters:
        return inputs
    return {**inputs, "position_ids": (inputs["attention_mask"].long().cumsum(-1) - 1).clamp(min=0)}


class HeadInputs(NamedTuple):
    """What the heads read at N positions.

    hidden: [N, H], what the LM head reads. logits: [N, V], only where the LM head cannot be split off. state: [N,
    hidden], the decoder's last hidden state, only where it was asked for.
    """

    hidden: Tensor
    logits: Tensor | None = None
    state: Tensor | None = None


class LanguageHead:
    """A transformers model as trunk and LM head: `read` runs the trunk, `score` and `logits` apply the head.

    Works for any causal or encoder-decoder model (tied heads, biases, soft-capped or scaled logits, LoRA on the head).
    What happens to the logits behind the head is read off the model's configuration and compared with the model's own
    logits at construction; where they differ the model is run whole, with a warning, at `[N, vocab]` memory.

    model: a PreTrainedModel, or a PeftModel around one, with an LM head. run: what runs it, the model itself unless
    something stands in its forward's place.
    """

    def __init__(self, model: Any, run: Callable[..., Any] | None = None):
        self.model = model
        self.run: Callable[..., Any] = model if run is None else run
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        self.config = base.config.get_text_config(decoder=True)
        self._forward_of = base.forward
        self.is_encoder_decoder = bool(base.config.is_encoder_decoder)
        self.separable = True
        self.separable = self._logits_agree()
        if not self.separable:
            warnings.warn(
                f"{type(base).__name__} changes its logits behind the LM head in a way that is not known here, so its "
                "logits are computed whole: expect memory of positions x vocabulary. The results are right.",
                stacklevel=2,
            )

    @property
    def head(self) -> Any:
        return lm_head_of(self.model)

    def read(self, where: Tensor, **inputs: Tensor) -> HeadInputs:
        """Run the trunk and keep what the head reads where `where` [B, T] is True, row by row: N positions.

        `where` may also be N places in the flattened [B * T], in any order and with repetitions.
        inputs: `input_ids`, `attention_mask`, and for encoder-decoder models `decoder_input_ids`,
        `decoder_attention_mask` [B, T]. Padding may stand on either side.
        """
        return self._read(where, inputs, needs_state=False)

    def read_with_state(self, where: Tensor, **inputs: Tensor) -> HeadInputs:
        """`read`, with the decoder's last hidden state, which value heads read."""
        return self._read(where, inputs, needs_state=True)

    def _read(self, where: Tensor, inputs: dict[str, Tensor], *, needs_state: bool) -> HeadInputs:
        captured: list[Tensor] = []

        def capture(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            captured.append(args[0])
            return (args[0][:, :0], *args[1:]) if self.separable else None

        handle = self.head.register_forward_pre_hook(capture)
        try:
            output = self.run(
                **positioned(self._forward_of, inputs),
                use_cache=False,
                return_dict=True,
                output_hidden_states=needs_state,
            )
        finally:
            handle.remove()
        return HeadInputs(
            _chosen(captured[0], where),
            None if self.separable else _chosen(output.logits, where),
            _chosen(last_hidden_state(self.model, output), where) if needs_state else None,
        )

    def logits(self, inputs: HeadInputs) -> Tensor:
        """[N, V] of a few positions, as the model itself would give them."""
        if inputs.logits is not None:
            return inputs.logits
        logits = self.head(inputs.hidden)
        if scale := getattr(self.config, "logit_scale", None):  # Cohere
            logits = logits * scale
        if scale := getattr(self.config, "logits_scaling", None):  # Granite
            logits = logits / scale
        if cap := getattr(self.config, "final_logit_softcapping", None):  # Gemma
            logits = torch.tanh(logits / cap) * cap
        return logits

    def score(self, inputs: HeadInputs, targets: Tensor, *, temperature: float = 1.0) -> TokenScores:
        """Log-probability of `targets` [N] and entropy at each position, at a temperature; differentiable."""

        if self._is_plain:
            return score_linear(inputs.hidden, self.head, targets, temperature=temperature)

        def score_chunk(hidden: Tensor, chunk_targets: Tensor) -> TokenScores:
            return score_logits(self.logits(HeadInputs(hidden)), chunk_targets, temperature=temperature)

        if inputs.logits is not None:
            return score_logits(inputs.logits, targets, temperature=temperature)
        spans = _spans(len(targets), self.config.vocab_size)
        parts = [
            checkpoint(score_chunk, inputs.hidden[span], targets[span], use_reentrant=False, preserve_rng_state=False)
            for span in spans
        ]
        return TokenScores(*(torch.cat(column) for column in zip(*parts, strict=True)))

    @property
    def _is_plain(self) -> bool:
        """Whether the logits are no more than the head's weight times its input, plus a bias."""
        head = self.head
        is_linear = type(head) is nn.Linear and type(head.weight) is nn.Parameter
        # What accelerate, PEFT or a user have hung on the head must run.
        is_hooked = head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head)
        changed = any(getattr(self.config, name, None) for name in LOGIT_CHANGES)
        return self.separable and is_linear and not is_hooked and not changed

    @torch.no_grad()
    def _logits_agree(self) -> bool:
        ids = torch.arange(1, 4, device=self.model.device)[None] % self.config.vocab_size
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.is_encoder_decoder:
            inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": torch.ones_like(ids)}
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            own = self.run(**inputs, use_cache=False, return_dict=True).logits[0]
            ours = self.logits(self.read(torch.ones_like(ids, dtype=torch.bool), **inputs))
        finally:
            for module in training:
                module.training = True
        tolerance = 1e-3 if own.dtype in (torch.float32, torch.float64) else 3e-2
        return ours.shape == own.shape and torch.allclose(ours, own, rtol=tolerance, atol=tolerance)


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
    """KL(policy, ref) in nats at N positions, summed over the whole vocabulary, a chunk of positions at a time.

    Infinite where the reference forbids (logit -inf) a token that the policy allows; see `trimtab_common.kl.full`.
    policy, ref: from head inputs of n positions to logits [n, V], such as `LanguageHead.logits`. Returns [N].
    """

    def log_p(head: Callable[[HeadInputs], Tensor], inputs: HeadInputs, span: slice) -> Tensor:
        part = HeadInputs(inputs.hidden[span], None if inputs.logits is None else inputs.logits[span])
        return (_upcast(head(part)) / temperature).log_softmax(-1)

    spans = _spans(len(policy_inputs.hidden), vocab_size)
    return torch.cat([full(log_p(policy, policy_inputs, span), log_p(ref, ref_inputs, span)) for span in spans])


def _chosen(states: Tensor, where: Tensor) -> Tensor:
    """[N, ...] of states [B, T, ...], by a mask [B, T] or by places in [B * T]."""
    return states[where] if where.dtype == torch.bool else states.flatten(0, 1).index_select(0, where)


def _linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Logits at a temperature, in float32 at least, in memory of their own."""
    logits = _upcast(nn.functional.linear(hidden, weight, bias))
    return logits if temperature == 1.0 else logits.div_(temperature)


def _spans(positions: int, vocab_size: int) -> list[slice]:
    """The positions in runs whose logits fill one chunk; one empty run where there are none."""
    size = max(1, CHUNK_ELEMENTS // vocab_size)
    return [slice(start, start + size) for start in range(0, max(positions, 1), size)]


def _upcast(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
