"""Log-probabilities, entropies and KL of chosen tokens: the one place that applies the LM head.

No `[batch, time, vocab]` tensor is ever made. The trunk runs once and gives the vectors that the LM head reads, at the
positions that count alone; the head is then applied to chunks of them, in float32 at least, and again in backward.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trimtab_common.kl import full

CHUNK_ELEMENTS = 2**24
"""Logits held at once (64 MiB in float32); backward holds about three times as many."""


class TokenScores(NamedTuple):
    """Both [N], in nats, float32 at least: log-probability of the chosen tokens, entropy of the distributions."""

    logprobs: Tensor
    entropy: Tensor


class _ScoreLogits(torch.autograd.Function):
    """Log-probability of a target and entropy from logits [n, V], holding one such buffer between the passes.

    At most three are alive at a time, the logits included; this is what bounds the memory of a step.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        log_p = _tempered(logits, temperature).log_softmax(-1)
        p = log_p.exp()
        entropy = -torch.linalg.vecdot(p, _finite(log_p))
        ctx.save_for_backward(p, entropy, targets)
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return log_p.gather(-1, targets[:, None]).squeeze(-1), entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor, None, None]:
        p, entropy, targets = ctx.saved_tensors
        of_logprobs, of_entropy = (
            x if x is None else x[:, None] / ctx.temperature for x in (grad_logprobs, grad_entropy)
        )
        grad: Any
        if of_entropy is None:
            grad = p * of_logprobs.neg()  # type: ignore[union-attr]
        else:  # dH/dz_j = -p_j (log p_j + H)
            weight = (_finite(p.log()) + entropy[:, None]).mul_(of_entropy)
            grad = (weight if of_logprobs is None else weight.add_(of_logprobs)).mul_(p).neg_()
        if of_logprobs is not None:  # dlog p_t/dz_j = [j = t] - p_j
            grad.scatter_add_(-1, targets[:, None], of_logprobs)
        return grad.to(ctx.dtype), None, None


def _finite(log_p: Tensor) -> Tensor:
    """log p in place, at least the least number: for a forbidden token p log p is then 0 and not 0 x infinity."""
    return log_p.clamp_(min=torch.finfo(log_p.dtype).min)


def score_logits(logits: Tensor, targets: Tensor, *, temperature: float = 1.0) -> TokenScores:
    """Log-probability of `targets` [N] and entropy under softmax(logits / temperature); logits [N, V], any dtype.

    Differentiable in both. Computed in float32, or float64 for such logits.
    """
    return TokenScores(*_ScoreLogits.apply(logits, targets, temperature))


class HeadInputs(NamedTuple):
    """What the LM head reads at N positions: [N, hidden]; `logits` [N, V] only where the head cannot be split off."""

    hidden: Tensor
    logits: Tensor | None = None


class LanguageHead:
    """A transformers model as trunk and LM head: `read` runs the trunk, `score` and `logits` apply the head.

    Works for any causal or encoder-decoder model (tied heads, biases, soft-capped or scaled logits, LoRA on the head).
    What happens to the logits behind the head is read off the model's configuration and compared with the model's own
    logits at construction; where they differ the model is run whole, with a warning, at `[N, vocab]` memory.

    model: a PreTrainedModel, or a PeftModel around one, whose `get_output_embeddings()` is its LM head.
    """

    def __init__(self, model: Any):
        self.model = model
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        self.config = base.config.get_text_config(decoder=True)
        self.takes_position_ids = "position_ids" in inspect.signature(base.forward).parameters
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
    def head(self) -> nn.Module:
        return self.model.get_output_embeddings()

    def read(self, where: Tensor, **inputs: Tensor) -> HeadInputs:
        """Run the trunk and keep what the head reads where `where` [B, T] is True, row by row: N positions.

        inputs: `input_ids`, `attention_mask`, and for encoder-decoder models `decoder_input_ids`,
        `decoder_attention_mask` [B, T]. Padding may stand on either side.
        """
        captured: list[Tensor] = []

        def capture(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            captured.append(args[0])
            return (args[0][:, :0], *args[1:]) if self.separable else None

        handle = self.head.register_forward_pre_hook(capture)
        try:
            logits = self.model(**self._positioned(inputs), use_cache=False, return_dict=True).logits
        finally:
            handle.remove()
        return HeadInputs(captured[0][where], None if self.separable else logits[where])

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

        def score_chunk(chunk: HeadInputs, chunk_targets: Tensor) -> TokenScores:
            return score_logits(self.logits(chunk), chunk_targets, temperature=temperature)

        chunks = list(_chunks(inputs, self.config.vocab_size))
        pairs = list(zip(chunks, targets.split([len(chunk.hidden) for chunk in chunks]), strict=True))
        # One chunk is kept for backward: computing it again would save no memory that forward has not needed.
        if torch.is_grad_enabled() and self.separable and len(pairs) > 1:
            parts = [checkpoint(score_chunk, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs]
        else:
            parts = [score_chunk(*pair) for pair in pairs]
        return TokenScores(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _positioned(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Inputs with position ids that count real tokens: without them GPT-2 sees left padding as text."""
        mask = inputs.get("attention_mask")
        if not self.takes_position_ids or mask is None or "position_ids" in inputs:
            return inputs
        return {**inputs, "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)}

    @torch.no_grad()
    def _logits_agree(self) -> bool:
        ids = torch.arange(1, 4, device=self.model.device)[None] % self.config.vocab_size
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.is_encoder_decoder:
            inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": torch.ones_like(ids)}
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            own = self.model(**inputs, use_cache=False, return_dict=True).logits[0]
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

    policy, ref: from head inputs of n positions to logits [n, V], such as `LanguageHead.logits`. Returns [N].
    """

    def log_p(head: Callable[[HeadInputs], Tensor], inputs: HeadInputs) -> Tensor:
        return _tempered(head(inputs), temperature).log_softmax(-1)

    pairs = zip(_chunks(policy_inputs, 2 * vocab_size), _chunks(ref_inputs, 2 * vocab_size), strict=True)  # two at once
    return torch.cat([full(log_p(policy, own), log_p(ref, other)) for own, other in pairs])


def _chunks(inputs: HeadInputs, vocab_size: int) -> Iterator[HeadInputs]:
    """The positions in runs whose logits fill one chunk; one empty run where there are none."""
    size = max(1, CHUNK_ELEMENTS // vocab_size)
    for start in range(0, max(len(inputs.hidden), 1), size):
        part = slice(start, start + size)
        yield HeadInputs(inputs.hidden[part], None if inputs.logits is None else inputs.logits[part])


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits if temperature == 1.0 else logits / temperature
