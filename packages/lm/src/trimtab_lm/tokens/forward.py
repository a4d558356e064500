"""Forward passes over laid-out tokens, which return token scores or sequence scores instead of logits.

`transformers.Trainer` hands the model to wrappers (DDP, FSDP, DeepSpeed, torch.compile) that must see one forward pass
with everything in it, and it saves the model itself. The model therefore keeps its class, and its `forward` takes one
more keyword, `tokens`: a batch of `trimtab_lm.tokens.layout.lay_out`.
"""

import functools
import inspect
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trimtab_common.accelerators import multiplies_in_float32
from trimtab_common.sharding import whole_weights
from trimtab_lm.compat.models import attention_of
from trimtab_lm.interface import (
    Batch,
    Forward,
    Model,
    base_of,
    decoder_config,
    learns_prompt,
    scores_last_token,
    trunk_of,
)
from trimtab_lm.tokens.attention import attends_fully, is_verified
from trimtab_lm.tokens.dropout import without_dropout
from trimtab_lm.tokens.fast import GroupMask
from trimtab_lm.tokens.inputs import TokenReader
from trimtab_lm.tokens.layout import Layout, TokenGroup, lay_out
from trimtab_lm.tokens.logprobs import LanguageHead
from trimtab_lm.tokens.router import classifier_router_loss, has_router_loss
from trimtab_lm.tokens.scores import upcast

EXACT = (torch.float32, torch.float64)
"""Types in which another order of the same sums changes results by far less than text that leaks."""


def score_tokens_in_forward(model: Model) -> LanguageHead:
    """Adds `model(tokens=batch, temperature=1.0)`, which returns the TokenScores [N] of the batch's counted tokens.

    `LanguageHead.score` describes its other options. Calls without `tokens` run the model's own forward. A second call
    with the same model changes nothing.

    Args:
        model: a language model. It takes batches of `lay_out`, or model inputs with the columns of `from_labels`.

    Returns:
        The head that computes the scores.
    """
    if (head := getattr(_own_forward(model), "language_head", None)) is not None:
        return head
    run = model.forward
    head = LanguageHead(model, run)
    _extend_forward(model, run, head.score, score_tokens_in_forward, language_head=head)
    return head


def score_sequences_in_forward(model: Model) -> bool:
    """Adds `model(tokens=batch)` to a sequence classifier, which returns logits [S, labels] and the router's loss.

    The logits are those at the last token of each branch. See `tokens.router` for the loss, which needs padded rows.

    The classifier's own forward takes the last token whose id is not the padding id. Where padding is the end token it
    would read before the end of a text.

    Returns:
        Whether the model takes `tokens` afterwards. Encoders and encoder-decoders (BERT, T5) do not: their heads read
        more than one position of a decoder. They are left unchanged and must be called on padded rows.
    """
    base = base_of(model)
    if not scores_last_token(base):
        return False
    if getattr(_own_forward(model), "scores_sequences", False):
        return True
    trunk = trunk_of(base)
    reader = TokenReader(base, trunk.forward)

    def score(tokens: Batch) -> tuple[Tensor, Tensor | float]:
        inputs = reader.inputs(tokens)
        with reader.attending(inputs):
            output = trunk(**inputs, use_cache=False, return_dict=True)
        states = output.last_hidden_state.flatten(0, 1).index_select(0, tokens["ends"])
        logits = upcast(base.get_submodule("score")(states))
        return logits, classifier_router_loss(base, output.get("router_logits"), inputs.get("attention_mask"), states)

    _extend_forward(model, model.forward, score, score_sequences_in_forward, scores_sequences=True)
    return True


def _own_forward(model: nn.Module) -> Forward:
    """Returns the model's forward; gives a copy of an extended model its class's forward back.

    The extension runs the model that it was made for, and `copy.deepcopy` hands it to the copy.
    """
    if getattr(model.forward, "extends", model) is not model:
        del model.forward
    return model.forward


def _extend_forward(
    model: nn.Module, run: Forward, score: Callable[..., object], extend: Callable[[Any], object], **marks: object
) -> None:
    """Replaces `model.forward` by one that calls `score` if it gets tokens, and `run` otherwise.

    A copy of the model gets its own forward from `extend`, at its first call.
    """

    # Trainer reads from the signature which columns the model takes, so it stays the model's. A bound method has it
    # under __func__, a plain function that someone has put there has it itself.
    @functools.wraps(getattr(run, "__func__", run))
    def forward(self: nn.Module, *args: object, tokens: Batch | None = None, **kwargs: object) -> object:
        if self is not model:
            extend(self)
            return self.forward(*args, tokens=tokens, **kwargs)
        return run(*args, **kwargs) if tokens is None else score(tokens, **kwargs)

    for name, value in {**marks, "extends": model}.items():
        setattr(forward, name, value)
    model.forward = MethodType(forward, model)


def best_layout(model: Model, *, share_prefix: bool, is_noisy: bool = False) -> Layout:
    """Returns the layout with the fewest positions that gives the same outputs as padded rows.

    Each candidate that the model's type allows (`attention.VERIFIED`) is run on a few tokens and compared. Warns where
    only padded rows are left.

    Args:
        model: the model that will read the batches.
        share_prefix: whether groups have several branches; a tree, which needs a 4-D mask, is tried only then.
        is_noisy: whether training adds noise to the layers (dropout, NEFTune). Its random numbers depend on the rows,
            and NEFTune's scale on their width, so a single row is not tried.
    """
    base = base_of(model)
    if base.config.is_encoder_decoder:
        return "encoder-decoder"
    if learns_prompt(model):
        return "padded"  # PEFT puts what it learned before each row, and drops position ids
    attention = attention_of(base)
    reason = f"{attention} attention mixes sequences that share a row"
    if has_router_loss(base):
        reason = "its router's loss (output_router_logits=True) is computed over padded rows"
    elif not is_verified(base):
        reason = f"the model type {base.config.model_type!r} is not verified to keep sequences in one row apart"
    elif "position_ids" in inspect.signature(base.forward).parameters:
        candidates: list[Layout] = ["packed"]
        if attends_fully(base):
            if share_prefix:
                candidates.insert(0, "tree")
            if attention == "sdpa" and not is_noisy and not torch.accelerator.is_available():  # where it may yet move
                candidates.insert(0, "row")
        with whole_weights(base):  # DeepSpeed divides weights as they are loaded
            for layout in candidates:
                if _agrees(base, layout) and (layout != "tree" or _agrees(base, "packed")):  # see `cheapest_split`
                    return layout
    warnings.warn(
        f"{type(base).__name__}: {reason}, so each sequence gets a separate padded row. The results are right, but "
        "training is slower. Common decoders (Llama, Qwen, Mistral, Gemma) share rows with attn_implementation='sdpa' "
        "or 'eager'.",
        stacklevel=3,
    )
    return "padded"


def masked_size(model: Model) -> int | None:
    """Returns the `hidden_size` of `lay_out`; None for attention that skips what a tree's mask excludes."""
    return None if attention_of(base_of(model)) == "flex_attention" else decoder_config(model).hidden_size


@torch.no_grad()
def _agrees(model: PreTrainedModel, layout: Layout) -> bool:
    """Whether a layout changes the hidden states far less than attention across branches would."""
    vocab_size = decoder_config(model).vocab_size
    first, second, third = ([(7 * i + k) % vocab_size for i in range(1, 4)] for k in (1, 3, 5))
    groups = [TokenGroup(first, [second, third], [[1] * 3] * 2)] * 2
    padded = lay_out(groups, "padded", pad_token_id=0)
    leaking = lay_out([TokenGroup(first, [second + first + third], [[1] * 9])], "padded", pad_token_id=0)
    with without_dropout(model):
        expected = _hidden(model, padded).view(4, 3, -1)[1::2]
        leaked = _hidden(model, leaking)[-3:]
        try:
            # A row of twelve holds two branches with a prefix each.
            hidden = _hidden(model, lay_out(groups, layout, pad_token_id=0, width=12)).view(4, 3, -1)[1::2]
        except (NotImplementedError, RuntimeError, TypeError, ValueError):
            return False  # the model's attention does not take this mask
    is_exact = expected.dtype in EXACT and multiplies_in_float32(expected.device)
    return bool((hidden - expected).norm() <= (5e-4 if is_exact else 0.05) * (leaked - expected).norm())


def _hidden(model: PreTrainedModel, tokens: Batch) -> Tensor:
    """Returns the trunk's hidden states [N, H] at the positions that predict the counted tokens.

    Raises:
        NotImplementedError: the mask of a row is not left to SDPA.
    """
    tokens = {name: value.to(model.device) for name, value in tokens.items()}
    trunk = trunk_of(model)
    inputs = TokenReader(model, trunk.forward).inputs(tokens)
    hidden = trunk(**inputs, use_cache=False, return_dict=True).last_hidden_state
    mask = inputs.get("attention_mask")
    if isinstance(mask, GroupMask) and mask.was_read:
        raise NotImplementedError(f"{type(model).__name__} reads the attention mask outside of SDPA.")
    return hidden.flatten(0, 1)[tokens["source"]]
