"""Scores of laid-out tokens and sequences, computed inside the model's own forward.

`transformers.Trainer` hands the model to wrappers (DDP, FSDP, DeepSpeed, torch.compile) that must see one forward pass
with everything in it, and saves the model as it is. So the model stays what it was, and its `forward` learns one more
keyword, `tokens`: a batch of `trimtab_lm.tokens.layout.lay_out`.
"""

import functools
import inspect
import warnings
from types import MethodType
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from trimtab_lm.models.interface import base_of
from trimtab_lm.tokens.layout import Layout, TokenGroup, lay_out, tree_mask
from trimtab_lm.tokens.logprobs import LanguageHead, TokenScores, positioned

INPUTS = ("input_ids", "attention_mask", "position_ids", "decoder_input_ids", "decoder_attention_mask")


def score_tokens_in_forward(model: Any) -> LanguageHead:
    """Teach a language model `model(tokens=batch, temperature=1.0)`: TokenScores [N] of the batch's counted tokens.

    batch: from `lay_out`, or model inputs with `from_labels`' columns. Every other call is as before. model: a
    PreTrainedModel or a PeftModel around one. Doing it twice changes nothing.
    """
    if (known := getattr(model.forward, "language_head", None)) is not None:
        return known
    run = model.forward
    head = LanguageHead(model, run)

    def score(tokens: dict[str, Tensor], temperature: float = 1.0) -> TokenScores:
        return head.score(
            head.read(tokens["source"], **model_inputs(model, tokens)), tokens["targets"], temperature=temperature
        )

    _extend_forward(model, run, score, language_head=head)
    return head


def score_sequences_in_forward(model: Any) -> bool:
    """Teach a sequence classifier `model(tokens=batch)`: the logits [S, labels] at each branch's last token.

    The classifier's own forward looks for the last token that is not padding by its id, and so reads before the end
    of a text where padding is the end token. Returns whether the model could be taught: one whose head reads something
    else than one position of a decoder (BERT, T5) is left alone, and must be called on padded rows.
    """
    base = base_of(model)
    head = getattr(base, "score", None)
    if not isinstance(head, nn.Module) or base.config.is_encoder_decoder:
        return False
    if getattr(model.forward, "scores_sequences", False):
        return True

    def score(tokens: dict[str, Tensor]) -> Tensor:
        inputs = positioned(base.base_model.forward, model_inputs(base, tokens))
        hidden = base.base_model(**inputs, use_cache=False, return_dict=True).last_hidden_state
        logits = base.score(hidden.flatten(0, 1).index_select(0, tokens["ends"]))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    _extend_forward(model, model.forward, score, scores_sequences=True)
    return True


def _extend_forward(model: Any, run: Any, score: Any, **marks: Any) -> None:
    # The signature stays the model's: Trainer reads from it which columns the model takes.
    @functools.wraps(getattr(run, "__func__", run))
    def forward(self: Any, *args: Any, tokens: dict[str, Tensor] | None = None, **kwargs: Any) -> Any:
        return run(*args, **kwargs) if tokens is None else score(tokens, **kwargs)

    for name, value in marks.items():
        setattr(forward, name, value)
    model.forward = MethodType(forward, model)


def model_inputs(model: Any, tokens: dict[str, Tensor]) -> dict[str, Any]:
    """What the model takes of a laid-out batch: a tree's 4-D mask; an encoder that branches share runs here, once."""
    inputs: dict[str, Any] = {name: tokens[name] for name in INPUTS if name in tokens}
    base = base_of(model)
    if "branch" in tokens:
        inputs["attention_mask"] = _attention_mask(base, tokens["document"], tokens["branch"])
    if "encoder_row" in tokens and len(tokens["encoder_row"]) > len(inputs["input_ids"]):
        rows = tokens["encoder_row"]
        read = base.get_encoder()(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        read.last_hidden_state = read.last_hidden_state.index_select(0, rows)
        inputs["encoder_outputs"] = read  # in the model's own class, which may hold more (router logits)
        for name in ("input_ids", "attention_mask"):  # without input_ids FSMT has no causal mask
            inputs[name] = inputs[name].index_select(0, rows)
    return inputs


def _attention_mask(model: Any, document: Tensor, branch: Tensor) -> Any:
    kind = model.config._attn_implementation
    if kind == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        def reads(b: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
            same = (document[b, q] == document[b, k]) & (k <= q)
            return same & ((branch[b, k] == 0) | (branch[b, k] == branch[b, q]))

        rows, width = document.shape
        return create_block_mask(reads, rows, None, width, width, device=document.device)
    mask = tree_mask(document, branch)
    if kind != "eager":
        return mask
    dtype = next(model.parameters()).dtype
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def best_layout(model: Any, *, share_prefix: bool) -> Layout:
    """The leanest layout that gives this model's own outputs: tree, packed, padded, or encoder-decoder.

    share_prefix: whether groups have several branches, so that a tree is worth its mask. A layout is not believed but
    tried, on a few tokens; what the model cannot do is said in a warning.
    """
    base = base_of(model)
    if base.config.is_encoder_decoder:
        return "encoder-decoder"
    if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
        return "padded"  # PEFT puts what it learned before each row, and drops position ids
    if "position_ids" in inspect.signature(base.forward).parameters:
        candidates: tuple[Layout, ...] = ("packed",)
        if share_prefix and not _looks_through_windows(base.config):
            candidates = ("tree", "packed")
        for layout in candidates:
            if _agrees(base, layout):
                return layout
    warnings.warn(
        f"{type(base).__name__} with {base.config._attn_implementation} attention mixes sequences that share a row, so "
        "each gets a padded row of its own: right, but slower. Attention 'sdpa' or 'eager' usually can.",
        stacklevel=3,
    )
    return "padded"


def _looks_through_windows(config: Any) -> bool:
    """Whether some layers see the last tokens only: they take a tree's mask as it is, and would see too much."""
    config = config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or [])
    return bool(kinds - {"full_attention"}) or (not kinds and getattr(config, "sliding_window", None) is not None)


@torch.no_grad()
def _agrees(model: Any, layout: Layout) -> bool:
    """Whether hidden states in this layout are those of padded rows, next to what leaking would change."""
    vocab = model.config.get_text_config(decoder=True).vocab_size
    first, second, third = ([(7 * i + k) % vocab for i in range(1, 4)] for k in (1, 3, 5))
    groups = [TokenGroup(first, [second, third], [[1] * 3] * 2)]
    apart = lay_out(groups, "padded", pad_token_id=0)
    leaking = lay_out([TokenGroup(first, [second + first + third], [[1] * 9])], "padded", pad_token_id=0)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        expected = _hidden(model, apart, apart["source"])[3:]
        leaked = _hidden(model, leaking, leaking["source"])[-3:]
        try:
            own = lay_out(groups, layout, pad_token_id=0)
            hidden = _hidden(model, own, own["source"])[3:]
        except (NotImplementedError, RuntimeError, TypeError, ValueError):
            return False  # a mask that this attention does not take
    finally:
        for module in training:
            module.training = True
    return bool((hidden - expected).norm() <= 0.05 * (leaked - expected).norm())


def _hidden(model: Any, tokens: dict[str, Tensor], where: Tensor) -> Tensor:
    device = model.device
    tokens = {name: value.to(device) for name, value in tokens.items()}
    trunk = model.base_model
    inputs = positioned(trunk.forward, model_inputs(model, tokens))
    hidden = trunk(**inputs, use_cache=False, return_dict=True).last_hidden_state
    return hidden.flatten(0, 1)[where.to(device)].float()
