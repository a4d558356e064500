"""Direct preference optimisation: the policy learns from pairs of answers, without a reward model.

Rafailov et al. 2023, arXiv:2305.18290: both answers of a pair are scored under the policy and under a fixed reference,
and the loss is a function of the four log-probabilities.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from trimtab_lm.tokens.scores import TokenScores
from trimtab_lm.tokens.sequences import score_sequences


class PairScores(NamedTuple):
    """The scores of both answers of B pairs, [B] each, summed over the answer's unmasked tokens, and a router's loss.

    Log-probabilities and entropies are in nats. `router_loss` is a scalar, 0 for a model without experts.
    """

    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_entropy: Tensor
    rejected_entropy: Tensor
    chosen_length: Tensor
    rejected_length: Tensor
    router_loss: Tensor


class Boxes(Protocol):
    """The trainer, whose documented methods may be replaced."""

    def compute_reference_log_probs(self, padded_batch: Any) -> tuple[Tensor, Tensor]: ...
    def dpo_loss(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]: ...


def score(model: Callable[..., TokenScores], tokens: Mapping[str, Tensor]) -> PairScores:
    """Both answers of each pair in one forward pass, without logits of the whole vocabulary.

    tokens: sequence 2i is the chosen answer of pair i, sequence 2i + 1 its rejected one; see `collator`.
    """
    scores = score_sequences(model, tokens)
    chosen, rejected = scores.logps.view(-1, 2).unbind(1)
    chosen_entropy, rejected_entropy = scores.entropy.view(-1, 2).unbind(1)
    chosen_length, rejected_length = scores.lengths.view(-1, 2).unbind(1)
    entropies, lengths = (chosen_entropy, rejected_entropy), (chosen_length, rejected_length)
    return PairScores(chosen, rejected, *entropies, *lengths, scores.router_loss)


def compare(
    boxes: Boxes,
    model: Callable[..., TokenScores],
    batch: Any,
    tokens: Mapping[str, Tensor],
    *,
    count: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, PairScores]:
    """The losses of `count` pairs, router losses included, and the implicit rewards of their answers, all [count].

    The fourth result is the scores of all B pairs.

    Args:
        batch: for the reference, with its log-probabilities where they are precomputed.
        tokens: the same, for `score`.
        count: the first pairs, which are compared with each other alone; None: all. 0 counts as 1.
    """
    reference = boxes.compute_reference_log_probs(batch)
    policy = score(model, tokens)
    kept = None if count is None else max(count, 1)  # the mean of no pair is NaN
    logps = [values[:kept] for values in (policy.chosen_logps, policy.rejected_logps, *reference)]
    lengths = {"chosen_length": policy.chosen_length[:kept], "rejected_length": policy.rejected_length[:kept]}
    losses, chosen, rejected = boxes.dpo_loss(*logps, **lengths)
    return losses + policy.router_loss, chosen, rejected, policy
