"""Log-probabilities, entropies and KL of chosen tokens: the one place that applies the LM head.

No tensor [B, T, V] of logits exists at any time. The trunk runs once and gives the vectors that the LM head reads, at
counted positions only. The head is applied to chunks of them; see `scores`.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from trimtab_common.formulas.kl import full
from trimtab_common.sharding import whole_weights
from trimtab_lm.interface import Batch, Forward, Model, base_of, decoder_config
from trimtab_lm.tokens.dropout import without_dropout
from trimtab_lm.tokens.inputs import TokenReader
from trimtab_lm.tokens.router import check_reaches, router_coefficient
from trimtab_lm.tokens.scores import TokenScores, chunk_size, score_chunks, score_linear, score_logits, upcast

LOGIT_CHANGES = ("logit_scale", "logits_scaling", "final_logit_softcapping")
"""Settings that change the logits after the head: a factor (Cohere), a divisor (Granite), a soft cap (Gemma)."""


def lm_head_of(model: Model) -> nn.Module | None:
    """Returns the module that turns hidden states into logits; None for a model without one.

    It is `model.get_output_embeddings()`. Where that is an embedding table (FSMT), it is the linear layer of the
    table's shape.

    Raises:
        ValueError: the output embeddings are a table, and none or several of the linear layers have its shape.
    """
    head: nn.Module | None = model.get_output_embeddings()
    if not isinstance(head, nn.Embedding):
        return head
    shape = head.weight.shape
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module.weight.shape == shape]
    if len(layers) != 1:
        raise ValueError(
            f"The output embeddings of {type(model).__name__} are a table of shape {list(shape)}, and {len(layers)} of "
            "its linear layers have that shape, so its LM head is unknown. Return the linear layer that gives the "
            "logits from get_output_embeddings()."
        )
    return layers[0]


def last_hidden_state(model: Model, output: ModelOutput) -> Tensor:
    """Returns the decoder's last hidden state [B, T, hidden], which value heads and reward heads read.

    The LM head may read something else: T5 scales the state by d_model^-0.5 before a tied LM head, and BERT transforms
    it.

    Args:
        model: the model that gave the output.
        output: the output of a forward pass with `output_hidden_states=True`.

    Raises:
        RuntimeError: the model returned no hidden states.
    """
    states = output.get("decoder_hidden_states" if model.config.is_encoder_decoder else "hidden_states")
    if states is None:
        raise RuntimeError(
            f"{type(model).__name__} returned no hidden states, although output_hidden_states=True was passed, so a "
            "value head or reward head has nothing to read. Use a model that returns them."
        )
    return states[-1]


@contextmanager
def forward_replaced(
    module: nn.Module, forward: Callable[[Forward, Tensor], tuple[Tensor, ...]]
) -> Iterator[list[Tensor]]:
    """Replaces a module's forward inside the block by one that returns more tensors with the module's output.

    The further tensors pass through the module's forward hooks. Those of FSDP and DeepSpeed look at all outputs of a
    call, and so see the gradients that come back through any of them.

    Args:
        module: takes one tensor and returns one, such as an LM head.
        forward: takes the module's own forward and its input; returns the module's output, and the further tensors.

    Yields:
        The further tensors of the calls inside the block.
    """
    further: list[Tensor] = []
    run = module.forward
    own = vars(module).get("forward")  # accelerate's hooks set it

    def keep(_: nn.Module, __: object, outputs: tuple[Tensor, ...]) -> Tensor:
        further.extend(outputs[1:])
        return outputs[0]

    handle = module.register_forward_hook(keep)  # after those of FSDP and DeepSpeed
    module.forward = partial(forward, run)
    try:
        yield further
    finally:
        handle.remove()
        del module.forward
        if own is not None:
            module.forward = own


@contextmanager
def without_logits(model: Model) -> Iterator[None]:
    """Makes the LM head read no positions inside the block: the model's logits are [B, 0, V], at no cost.

    A model without an LM head runs unchanged.
    """
    head = lm_head_of(model)
    with nullcontext() if head is None else forward_replaced(head, lambda run, states: (run(states[:, :0]),)):
        yield


def state_width(model: Model) -> int:
    """Returns the width of `last_hidden_state`."""
    config = decoder_config(model)
    # OPT projects its states to another width. BLT's configuration names no width.
    widths = (getattr(config, name, None) for name in ("word_embed_proj_dim", "hidden_size"))
    return next((width for width in widths if width), None) or cast(nn.Linear, lm_head_of(model)).in_features


def linear_in_own_dtype(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """Returns `layer(hidden)`, computed in the layer's dtype and on its device, under autocast too.

    Args:
        layer: [out, in].
        hidden: [..., in], of any dtype and device.
    """
    with torch.autocast(layer.weight.device.type, enabled=False):
        return layer(hidden.to(layer.weight))


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
        self.reader, self.is_encoder_decoder = TokenReader(model), bool(base.config.is_encoder_decoder)
        self.separable = True
        with whole_weights(model):  # DeepSpeed divides weights as they are loaded
            self._router_coefficient = router_coefficient(model)
            self.separable = self._logits_agree()
        if not self.separable:
            warnings.warn(
                f"{type(base).__name__} changes its logits after the LM head in an unknown way, so it computes all of "
                "them: expect memory of positions x vocabulary. The results are right.",
                stacklevel=2,
            )

    def score(
        self,
        tokens: Batch,
        temperature: float = 1.0,
        *,
        is_summed: bool = False,
        needs_read: bool = False,
        needs_state: bool = False,
    ) -> TokenScores:
        """Runs the model and scores N tokens; the LM head scores them inside its own call.

        FSDP and DeepSpeed gather a module's weights when it is called, and reduce its gradients when backward passes
        its inputs. The head's weights may therefore be read inside its call only.

        Args:
            tokens: a batch of `lay_out`, or rows of model inputs, padded on either side, with the columns of
                `from_labels`. `source` [N] names places in any order and with repetitions.
            is_summed: see `score_linear`; makes no difference to a head that is no plain linear layer.
            needs_read: whether the result holds what `logits` reads at the places of `source`.
            needs_state: whether it holds the decoder's last hidden state there, for a value head.

        Returns:
            Scores that are differentiable in the model's weights.
        """
        head, source, targets = cast(nn.Linear, lm_head_of(self.model)), tokens["source"], tokens["targets"]
        read: list[Tensor] = []

        def score_at_head(run: Forward, states: Tensor) -> tuple[Tensor, ...]:
            if not self.separable:
                return (run(states),)
            hidden = states.flatten(0, 1).index_select(0, source)
            read.append(hidden)
            # A subclass of Linear or Parameter (quantized, LoRA) computes something else, and so does accelerate's hook
            # that loads offloaded weights. The class that FSDP derives from Linear has the forward of Linear.
            is_linear = inspect.ismethod(run) and run.__func__ is nn.Linear.forward
            if is_linear and type(head.weight) is nn.Parameter and not any(self._changes.values()):
                scores = score_linear(hidden, head, targets, temperature=temperature, is_summed=is_summed)
            else:
                sizes = {"vocab_size": self.config.vocab_size, "temperature": temperature}
                scores = score_chunks(lambda hidden: self._changed(run(hidden)), hidden, targets, **sizes)
            return run(states[:, :0]), scores.logprobs, scores.entropy

        inputs = self.reader.inputs(tokens)
        if self.reader.has_router_loss:  # a router's loss needs a 2-D mask; the tree layout has none
            mask = inputs.get("attention_mask")
            inputs["output_router_logits"] = mask is None or len(mask.shape) == 2
        with forward_replaced(head, score_at_head) as scored, self.reader.attending(inputs):
            output = self.run(**inputs, use_cache=False, return_dict=True, output_hidden_states=needs_state)
        if self.separable:
            logprobs, entropy = scored
        else:
            read = [output.logits.flatten(0, 1).index_select(0, source)]
            logprobs, entropy, *_ = score_logits(read[0], targets, temperature=temperature)
        router_loss: Tensor | float = 0.0
        if (aux_loss := output.get("aux_loss")) is not None:
            check_reaches(aux_loss, read[0], self.model)
            router_loss = self._router_coefficient * aux_loss
        state = None
        if needs_state:
            state = last_hidden_state(self.model, output).flatten(0, 1).index_select(0, source)
        return TokenScores(logprobs, entropy, router_loss, read[0] if needs_read else None, state)

    def logits(self, read: Tensor) -> Tensor:
        """Returns the model's logits [N, V] at a few places, from what `score` returns."""
        return self._changed(cast(nn.Linear, lm_head_of(self.model))(read)) if self.separable else read

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
        ids = torch.arange(1, 4, device=self.model.device) % self.config.vocab_size
        inputs = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids[None])}
        if self.is_encoder_decoder:
            inputs |= {f"decoder_{name}": column for name, column in inputs.items()}
        with without_dropout(self.model):
            expected = self.run(**inputs, use_cache=False, return_dict=True).logits[0]
            places = {"source": torch.arange(3, device=ids.device), "targets": ids}
            logits = self.logits(cast(Tensor, self.score({**inputs, **places}, needs_read=True).read))
        tolerance = 1e-3 if expected.dtype in (torch.float32, torch.float64) else 3e-2
        return logits.shape == expected.shape and torch.allclose(logits, expected, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def exact_kl(
    policy: Callable[[Tensor], Tensor],
    policy_read: Tensor,
    ref: Callable[[Tensor], Tensor],
    ref_read: Tensor,
    *,
    vocab_size: int,
    temperature: float = 1.0,
) -> Tensor:
    """Returns KL(policy, ref) over the whole vocabulary, in chunks of positions; see `trimtab_common.formulas.kl.full`.

    It is infinite where the reference forbids (logit -inf) a token that the policy allows.

    Args:
        policy, ref: functions from what a head reads at n positions to logits [n, V], such as `LanguageHead.logits`.
        policy_read, ref_read: what the two heads read at the same N positions.
        temperature: the temperature of both distributions.

    Returns:
        [N], in nats.
    """

    def logprobs(logits: Callable[[Tensor], Tensor], read: Tensor) -> Tensor:
        return (upcast(logits(read)) / temperature).log_softmax(-1)

    size = chunk_size(vocab_size, policy_read.device)
    chunks = zip(policy_read.split(size), ref_read.split(size), strict=True)
    return torch.cat([full(logprobs(policy, p), logprobs(ref, q)) for p, q in chunks])
