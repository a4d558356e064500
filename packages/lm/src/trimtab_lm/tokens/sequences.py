"""Scores of whole sequences: sums over the tokens that count."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from trimtab_lm.tokens.layout import sum_per_sequence
from trimtab_lm.tokens.scores import TokenScores


class SequenceScores(NamedTuple):
    """The scores of S sequences, [S] each, summed over the tokens that count, and a router's loss.

    Args:
        logps: log-probabilities, in nats.
        entropy: entropies of the distributions that the tokens were chosen from, in nats.
        lengths: how many tokens count.
        router_loss: a scalar, 0 for a model without experts.
    """

    logps: Tensor
    entropy: Tensor
    lengths: Tensor
    router_loss: Tensor


def score_sequences(model: Callable[..., TokenScores], tokens: Mapping[str, Tensor]) -> SequenceScores:
    """Scores the sequences of a laid-out batch in one forward pass, without logits of the whole vocabulary.

    Args:
        model: its forward takes `tokens`; see `score_tokens_in_forward`.
        tokens: the columns of `lay_out`, or model inputs with those of `from_labels`.
    """
    scores, lengths = model(tokens=tokens), tokens["lengths"]
    logps = sum_per_sequence(scores.logprobs, tokens["sequence"], len(lengths))
    entropy = sum_per_sequence(scores.entropy, tokens["sequence"], len(lengths))
    return SequenceScores(logps, entropy, lengths, torch.as_tensor(scores.router_loss))
