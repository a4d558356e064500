"""Supervised fine-tuning: minimize -log p of the target tokens, averaged over them, in nats."""

from typing import Any

from torch import Tensor, nn

from trimtab_lm.interface import Model, base_of
from trimtab_lm.tokens.layout import from_labels
from trimtab_lm.tokens.scores import TokenScores


def score_labels(model: nn.Module, batch: dict[str, Any], *, policy: Model) -> TokenScores:
    """TokenScores [N] of the labels that are not -100, for a loss that is their sum or mean.

    Args:
        model: as it is wrapped; its forward takes `tokens`.
        batch: model inputs and `labels` [B, T], -100 where a token does not count. Decoder inputs of an encoder-decoder
            model that a collator leaves out are made of the labels.
        policy: the same model, not wrapped.
    """
    is_encoder_decoder = bool(policy.config.is_encoder_decoder)
    if is_encoder_decoder and "decoder_input_ids" not in batch:
        base: Any = base_of(policy)
        batch = {**batch, "decoder_input_ids": base.prepare_decoder_input_ids_from_labels(batch["labels"])}
    labels = from_labels(batch["labels"], is_encoder_decoder=is_encoder_decoder)
    return model(tokens=batch | labels, is_summed=True)


def token_nll(scores: TokenScores, *, count: Tensor | int) -> Tensor:
    """-sum of log p [N], each with a router's loss, over `count`: the tokens of all parts of the optimizer step."""
    return -(scores.logprobs - scores.router_loss).sum() / count
